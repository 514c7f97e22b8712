"""The trace checker accepts correct runs, and finds every planted bug: the broken rule, the step and the page."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from minisgl.core import EngineDeadError, EngineSpec
from minisgl.plugins.scheduler.guard import StarvationGuard
from minisgl.scheduler.base import Budget, Plan, Running, Waiting
from minisgl.testing import SimEngine
from minisgl.testing.drive import make_plugin
from minisgl.testing.planted import PLANTED, planted
from minisgl.testing.small import SPEC, job, no_lookahead
from minisgl.testing.traced import traced
from minisgl.trace import events as ev
from minisgl.trace.check import check
from minisgl.trace.contents import Contents
from minisgl.trace.read import TraceError, read
from minisgl.trace.state import InFlightStep
from minisgl.trace.violation import Violation

TEXTS = {
    "pages freed while a step is in flight": "the page is to be allocated to the request, but it is retiring",
    "a request-pool row reused while a late token write is pending": "uses this request-pool row for another request",
    "duplicates freed before remap": "points to this page for positions from 0 on, but the page is retiring",
    "a double release on abort": "the page is to be retired, but it is retiring",
    "admission that counts tokens instead of pages": "whole pages, but only",
    "cached pages counted as evictable before they are locked": "whole pages, but only",
    "a Step that shares memory with the scheduler": "the step was changed after its launch",
    "a prefix that stays locked": "a prefix is still locked, but no request uses it",
    "a page that is never retired": "the request stopped running, but never retired the page",
    "a late token kept for another admission": "gains a token after its end (abort)",
    "KV of a rejected draft that is cached": "are inserted into the cache, but",
    "tokens after a rejected draft that count": "but the request's last row ended at",
    "pages of drafts freed while the step is in flight": "free pages; by the events there are",
    "a stop token inside an accepted run that is missed": "have no final reply",
    "a penalty that counts a token too many": "have no final reply",
    "log-probabilities shifted by one": "have no final reply",
    "the result of an aborted verification that counts": "gains a token after its end (abort)",
    "a request-pool row twice in a step": "two rows of the step have the same request-pool row",
    "pages of one round for a step of several": "the request's page table has no page for positions from",
    "tokens of later rounds that are not read": "the request's last row ended at",
    "a step that starts after the first round of the step before": "the request's last row ended at",
    "masks of the step before": "have no final reply",
    "masks shifted by one": "have no final reply",
    "a rejected draft in a grammar": "have no final reply",
    "a discarded token in a grammar": "have no final reply",
    "a dead end of a grammar that is missed": "have no final reply",
    "a dead end after a draft that ends the request": "have no final reply",
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_found(name: str, tmp_path: Path) -> None:
    """The checker finds the bug, and accepts the same workload without the bug."""
    bug = PLANTED[name]
    with planted():
        bug.run(tmp_path / "healthy.jsonl")
    assert check(read(tmp_path / "healthy.jsonl")) is None
    with planted(bug.plant), pytest.raises(AssertionError, match=bug.oracle):
        bug.run(tmp_path / "bug.jsonl")
    found = check(read(tmp_path / "bug.jsonl"))
    assert found is not None
    print(found)
    assert found.rule == bug.rule
    assert TEXTS[name] in found.text
    assert found.step is not None and found.line > 1
    assert len(str(found).splitlines()) <= 4


# ---- rules that no planted bug breaks: a correct trace in which one event is changed -------------------------

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """Return the lines of a correct trace with chunks, shared prefixes, retractions and evictions."""
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    spec = EngineSpec(page_size=4, num_pages=14, max_running_requests=3, max_seq_len=40, vocab_size=50)
    cache, policy = make_plugin("cache", "radix", page_size=4), make_plugin("scheduler", "mixed")
    clients = [job(u, 14, 12, first=u % 2, arrive=u) for u in range(1, 8)]
    with no_lookahead(), traced(path, spec, cache, policy, max_prefill_tokens=6) as drive:
        report = drive.run(clients)
    assert report.retractions and report.cached_tokens
    assert check(read(path)) is None
    return [json.loads(line) for line in path.read_text().splitlines()]


def first(lines: Lines, kind: str, condition: Callable[[dict[str, Any]], Any] = lambda _: True) -> dict[str, Any]:
    """Return the first event of a kind that satisfies a condition."""
    return next(line for line in lines if line["event"] == kind and condition(line))


def request_longer_than_pool(lines: Lines) -> None:
    first(lines, "add")["max_tokens"] = 60


def oldest_request_retracted(lines: Lines) -> None:
    at = lines.index(first(lines, "batch", lambda b: len(b["uids"]) > 1))
    lines.insert(at + 1, {"event": "retract", "step": lines[at]["step"], "uid": min(lines[at]["uids"])})


def admitted_before_starved_request(lines: Lines) -> None:
    lines[0]["options"]["starvation_steps"] = 2
    add = first(lines, "add", lambda a: a["uid"] == 1)
    lines.insert(1, {**add, "uid": 99})


def position_computed_twice(lines: Lines) -> None:
    first(lines, "batch", lambda b: b["num_decode"])["num_computed_tokens"][0] -= 1


def chunk_that_samples(lines: Lines) -> None:
    batch = first(lines, "batch", lambda b: 0 in b["num_sampled_tokens"])
    batch["num_sampled_tokens"][batch["num_sampled_tokens"].index(0)] = 1


def prefix_of_other_request(lines: Lines) -> None:
    """Change the prompt of a request that matched cached pages, so that the pages hold another prefix."""
    uid = first(lines, "match", lambda m: m["pages"])["uid"]
    first(lines, "add", lambda a: a["uid"] == uid)["prompt_ids"][0] += 1


def token_not_kept(lines: Lines) -> None:
    done = first(lines, "step", lambda d: d["kept"] is None)
    done["kept"] = [0] * len(done["tokens"])


def pages_in_wrong_order(lines: Lines) -> None:
    """Exchange two pages of one request: the owner of both is right, but the KV in them is in the wrong order."""
    batch = first(lines, "batch", lambda b: b["num_decode"] and b["num_computed_tokens"][0] >= 12)
    idx = batch["req_pool_indices"][0]
    updates = [line["page_table_updates"] for line in lines[: lines.index(batch)] if line["event"] == "batch"]
    pages = {column: page for update in updates for row, column, page in zip(*update, strict=True) if row == idx}
    for entries, values in zip(batch["page_table_updates"], ([idx, idx], [0, 1], [pages[1], pages[0]]), strict=True):
        entries.extend(values)


def page_of_other_request(lines: Lines) -> None:
    """Change a page-table write, so that two rows of the step have the same page."""
    batch = first(lines, "batch", lambda b: len(set(b["page_table_updates"][0])) > 1)
    batch["page_table_updates"][2][-1] = batch["page_table_updates"][2][0]


def answer_too_short(lines: Lines) -> None:
    uid = first(lines, "finish", lambda f: f["finish_reason"] == "length")["uid"]
    first(lines, "add", lambda a: a["uid"] == uid)["max_tokens"] += 1


def two_replies(lines: Lines) -> None:
    at = lines.index(first(lines, "finish"))
    lines.insert(at, lines[at])


def too_many_steps_in_flight(lines: Lines) -> None:
    lines[0]["options"]["overlap"] = False


def step_number_left_out(lines: Lines) -> None:
    at = lines.index(first(lines, "batch", lambda b: b["step"] == 5))
    lines[at]["step"] = 6


def page_evicted_in_use(lines: Lines) -> None:
    at = lines.index(first(lines, "match", lambda m: m["pages"]))
    lines.insert(at + 1, {"event": "evict", "step": lines[at]["step"], "pages": lines[at]["pages"][-1:]})


def late_token_kept(lines: Lines) -> None:
    """Keep a token whose request was retracted while the token was in flight."""
    sampled = {line["step"]: line["num_sampled_tokens"] for line in lines if line["event"] == "batch"}
    done = first(lines, "step", lambda d: d["kept"] and [0, 1] in map(list, zip(d["kept"], sampled[d["step"]])))
    done["kept"] = sampled[done["step"]]


CHANGES: dict[Callable[[Lines], None], tuple[str, str]] = {
    request_longer_than_pool: (
        "invalid-request",
        "a request of 14 prompt tokens and up to 60 output tokens was queued",
    ),
    oldest_request_retracted: ("retraction", "the oldest running request is retracted"),
    admitted_before_starved_request: (
        "starvation",
        "before this older request, which has waited for 2 steps",
    ),
    position_computed_twice: ("row", "the row starts at position"),
    chunk_that_samples: ("row", "the row samples a token after position"),
    prefix_of_other_request: (
        "prefix",
        "to page 0 of the request, but the page holds the prefix of request",
    ),
    token_not_kept: ("late-token", "the row sampled a token, but the request did not gain the token"),
    late_token_kept: ("late-token", "keeps a token that was in flight when it was retracted"),
    page_of_other_request: ("page-owner", "the row writes to the page, which is owned by the cache"),
    pages_in_wrong_order: ("prefix", "position 0 of the request's page table reads the KV of another prefix"),
    answer_too_short: ("reply", "ended with reason length after 12 of 13 tokens"),
    two_replies: ("reply", "has had its final reply (length)"),
    too_many_steps_in_flight: ("stream", "the limit is 1"),
    step_number_left_out: ("stream", "the next step has number 5"),
    page_evicted_in_use: ("page-owner", "is evicted while requests [1] use it"),
}


def check_changed(change: Callable[[Lines], None], lines: Lines, folder: Path) -> Violation:
    """Return what the checker finds in the changed trace."""
    changed = json.loads(json.dumps(lines))
    change(changed)
    path = folder / "changed.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in changed))
    found = check(read(path))
    print(found)
    assert found is not None
    return found


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_event_is_found(change: Callable[[Lines], None], lines: Lines, tmp_path: Path) -> None:
    found = check_changed(change, lines, tmp_path)
    rule, text = CHANGES[change]
    assert found.rule == rule
    assert text in found.text


# ---- the same for steps of several rounds ------------------------------------------------------------------


@pytest.fixture(scope="module")
def lines_of_rounds(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """Return the lines of a correct trace whose steps have up to three rounds."""
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    cache, policy = make_plugin("cache", "radix", page_size=4), make_plugin("scheduler", "mixed")
    spec = EngineSpec(page_size=4, num_pages=60, max_running_requests=2, max_seq_len=120, vocab_size=50)
    with traced(path, spec, cache, policy, drafts=(2, 70, 0), rounds=3, full_drafts=True) as drive:
        drive.run([job(1, 9, 60), job(2, 9, 60), job(3, 9, 40, arrive=20, abort=30)])
    assert drive.report.counts.later_rounds > 10
    assert check(read(path)) is None
    return [json.loads(line) for line in path.read_text().splitlines()]


def repeated(lines: Lines, condition: Callable[[dict[str, Any]], Any] = lambda _: True) -> tuple[Any, Any]:
    """Return the first step of three rounds whose launch satisfies a condition, and its result."""
    batch = first(lines, "batch", lambda b: b["rounds"] == 3 and condition(b))
    return batch, first(lines, "step", lambda d: d["step"] == batch["step"])


def pages_of_the_first_round(lines: Lines) -> None:
    """Remove the writes of all pages behind the first round from the page table."""
    batch, _ = repeated(lines, lambda b: b["page_table_updates"][0])
    ends = {
        idx: -(-(start + count) // 4)
        for idx, start, count in zip(
            batch["req_pool_indices"], batch["num_computed_tokens"], batch["num_scheduled_tokens"], strict=True
        )
    }
    updates = [update for update in zip(*batch["page_table_updates"], strict=True) if update[1] < ends[update[0]]]
    assert len(updates) < len(batch["page_table_updates"][0])
    batch["page_table_updates"] = list(map(list, zip(*updates, strict=True))) or [[], [], []]


def rounds_not_recorded(lines: Lines) -> None:
    batch, done = repeated(lines)
    assert any(len(run) > batch["num_sampled_tokens"][i] for i, run in enumerate(done["runs"]))
    batch["rounds"] = 1


def token_of_a_round_lost(lines: Lines) -> None:
    done = repeated(lines)[1]
    done["runs"][0].pop()


def round_without_a_token(lines: Lines) -> None:
    done = first(lines, "step", lambda d: len((d["rounds"] or [[]])[0]) == 3 and 3 < sum(d["rounds"][0]) <= 6)
    done["rounds"][0] = [3, 0, sum(done["rounds"][0]) - 3]


def round_too_many(lines: Lines) -> None:
    done = first(lines, "step", lambda d: d["rounds"] and max(d["rounds"][0]) > 1)
    done["rounds"][0] = [1] * sum(done["rounds"][0])


def rounds_behind_the_longest_answer(lines: Lines) -> None:
    repeated(lines)[0]["rounds"] = 40


def start_after_the_first_round(lines: Lines) -> None:
    batch, done = repeated(lines)
    following = first(lines, "batch", lambda b: b["step"] == batch["step"] + 1)
    following["num_computed_tokens"][0] = batch["num_computed_tokens"][0] + done["rounds"][0][0]


CHANGES_OF_ROUNDS: dict[Callable[[Lines], None], tuple[str, str]] = {
    pages_of_the_first_round: ("page-table", "the request's page table has no page for positions from"),
    rounds_not_recorded: ("row", "tokens, and samples 3"),
    token_of_a_round_lost: ("row", "of at most 3 each; its run has"),
    round_without_a_token: ("row", "of at most 3 each; its run has"),
    round_too_many: ("row", "of at most 3 each; its run has"),
    rounds_behind_the_longest_answer: ("row", "the row computes 120 positions from"),
    start_after_the_first_round: ("row", "but the request's last row ended at"),
}


@pytest.mark.parametrize("change", CHANGES_OF_ROUNDS, ids=lambda change: change.__name__)
def test_changed_rounds_are_found(change: Callable[[Lines], None], lines_of_rounds: Lines, tmp_path: Path) -> None:
    found = check_changed(change, lines_of_rounds, tmp_path)
    rule, text = CHANGES_OF_ROUNDS[change]
    assert found.rule == rule
    assert text in found.text


def test_content_behind_the_accepted_tokens_of_rounds(lines_of_rounds: Lines, tmp_path: Path) -> None:
    """A position behind the tokens that count holds a draft: a row that reads it reads another prefix."""
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines_of_rounds))
    batch, done = repeated(lines_of_rounds, lambda b: b["num_computed_tokens"][0] > 20)

    def shorter(self: Contents, step: InFlightStep, event: ev.Done) -> Any:
        if event.step == batch["step"]:
            run = event.runs[0].pop()  # type: ignore[index]
            found = execute(self, step, event)
            event.runs[0].append(run)  # type: ignore[index]
            self._admissions[step.admission_orders[0]].append(run)
            return found
        return execute(self, step, event)

    execute = Contents.execute
    with patch.object(Contents, "execute", shorter):
        found = check(read(path))
    assert found is not None
    assert (found.rule, found.uid) == ("prefix", batch["uids"][0])
    position = batch["num_computed_tokens"][0] + len(done["runs"][0]) - 1
    assert f"position {position} of the request's page table reads the KV of another prefix" in found.text


class UnfairPolicy:
    """A policy that gives request 1 no row while another request runs."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        rows = [
            (r.uid, n)
            for r in running
            if r.uid != 1 or len(running) == 1
            if (n := budget.grant(r, r.num_remaining_tokens or 1))
        ]
        return Plan(rows + [(w.uid, n) for w in waiting if (n := budget.grant(w, w.num_tokens - w.num_cached_tokens))])


def test_starved_running_request_is_found(tmp_path: Path) -> None:
    """The same run is correct with a large ``starvation_steps`` and wrong with a small one."""
    path = tmp_path / "run.jsonl"
    clients = [job(1, 9, 8), job(2, 9, 50)]
    with traced(path, SPEC, make_plugin("cache", "naive", page_size=4), UnfairPolicy(), starvation_steps=512) as drive:
        drive.run(clients)
    assert check(read(path)) is None
    path.write_text(path.read_text().replace('"starvation_steps":512', '"starvation_steps":9'))
    found = check(read(path))
    assert found is not None
    assert (found.rule, found.uid) == ("starvation", 1)


@pytest.mark.parametrize("rule", ["right", "younger requests never give way"])
def test_starved_waiting_request_is_found(rule: str, tmp_path: Path) -> None:
    """A request that fits beside the older ones must start soon; others may overtake one that does not fit."""
    path = tmp_path / "run.jsonl"
    clients = [job(1, 9, 60), job(2, 90, 5, arrive=2), *(job(uid, 25, 20, arrive=uid) for uid in range(3, 60))]
    cache, policy = make_plugin("cache", "naive", page_size=4), make_plugin("scheduler", "mixed")
    plan = policy.plan
    policy.plan = lambda waiting, running, budget: plan([w for w in waiting if w.uid != 2], running, budget)
    with (
        patch.object(StarvationGuard, "_in_the_way", lambda self, req: None) if rule != "right" else nullcontext(),
        traced(path, SPEC, cache, policy, starvation_steps=5) as drive,
    ):
        drive.run(clients)
    found = check(read(path))
    overtaken = drive.report.first_token[2] > drive.report.first_token[4]
    assert overtaken
    assert (found is None) == (rule == "right"), found
    if found is not None:
        assert (found.rule, found.uid) == ("starvation", 2)
        assert "fits beside the running requests that arrived before it" in found.text


def test_reads_incomplete_trace_and_refuses_other_files(lines: Lines, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_text(text[:-20])
    trace = read(path)
    assert not trace.complete
    assert len(trace.events) == len(lines) - 2
    for content, message in (
        ("", "first line must be a header"),
        ("hello\n", "line 1 is not an event"),
        (text.replace('"version": 3', '"version": 7'), "has trace format 7"),
        (text.replace('"version": 3', '"version": 1').replace("num_tokens", "tokens"), "has trace format 1"),
    ):
        path.write_text(content)
        with pytest.raises(TraceError, match=message):
            read(path)


def test_engine_failure_breaks_no_promise(tmp_path: Path) -> None:
    """After an engine failure every request ends with an error, and pages that were in use are never freed."""
    path = tmp_path / "run.jsonl"
    cache, policy = make_plugin("cache", "radix", page_size=4), make_plugin("scheduler", "mixed")
    with traced(path, SPEC, cache, policy, engine=partial(SimEngine, dies_at=4)) as drive:
        for u in range(1, 5):
            drive.add(job(u, 9, 12))
        for _ in range(4):
            drive.step()
        with pytest.raises(EngineDeadError):
            drive.step()
        drive.fail("the device is gone")
    trace = read(path)
    assert check(trace) is None
    assert {event.finish_reason for event in trace if isinstance(event, ev.Finish)} == {"error"}


@pytest.mark.parametrize("num_requests", [3, 6, 9])
def test_promise_6_one_token_a_step(num_requests: int, tmp_path: Path) -> None:
    """Starved requests, waiting and running, get the few tokens of a step in turn: the one left out longest first."""
    path = tmp_path / "run.jsonl"
    spec = EngineSpec(page_size=4, num_pages=200, max_running_requests=num_requests, max_seq_len=64, vocab_size=50)
    plugins = make_plugin("cache", "naive", page_size=4), make_plugin("scheduler", "prefill_first")
    clients = [job(uid, 25, 4, first=uid) for uid in range(1, num_requests + 1)]
    with traced(path, spec, *plugins, starvation_steps=2, max_prefill_tokens=1) as drive:
        drive.run(clients)
    assert check(read(path)) is None
