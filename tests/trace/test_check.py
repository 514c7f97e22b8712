"""The trace checker: right runs pass, whatever they are; every planted bug is found, by its rule and where it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from minisgl.core import EngineDeadError, EngineSpec
from minisgl.scheduler.base import Budget, Plan, Running, Waiting
from minisgl.testing import SimEngine
from minisgl.testing.drive import make_plugin
from minisgl.testing.planted import PLANTED, planted
from minisgl.testing.small import SPEC, job, tight
from minisgl.testing.traced import traced
from minisgl.trace import events as ev
from minisgl.trace.check import check
from minisgl.trace.read import TraceError, read

WORDS = {
    "pages freed while a step is in flight": "is given a page that is retiring",
    "a slot reused while a late token write is pending": "still has another's row in the slot",
    "duplicates freed before remap": "its table still names the page for positions from 0 on, but it is retiring",
    "a double release on abort": "a page is given back that is retiring",
    "admission that counts tokens instead of pages": "whole pages, and only",
    "cached pages counted as evictable before they are locked": "whole pages, and only",
    "a Step that shares memory with the scheduler": "the step was changed after its launch",
    "a prefix that stays locked": "a prefix is still locked, and nobody uses it",
    "a page that nobody gives back": "the request has left its slot and never gave the page back",
    "a late token kept for another seat": "gains a token after its end (abort)",
}


@pytest.mark.parametrize("what", PLANTED)
def test_the_planted_bug_is_found_in_the_trace_and_the_healthy_run_passes(what: str, tmp_path: Path) -> None:
    bug = PLANTED[what]
    with planted():
        bug.run(tmp_path / "healthy.jsonl")
    assert check(read(tmp_path / "healthy.jsonl")) is None
    with planted(bug.plant), pytest.raises(AssertionError, match=bug.oracle):
        bug.run(tmp_path / "bug.jsonl")
    found = check(read(tmp_path / "bug.jsonl"))
    assert found is not None
    print(found)
    assert found.rule == bug.rule
    assert WORDS[what] in found.text
    assert found.step is not None and found.line > 1
    assert len(str(found).splitlines()) <= 4


# ---- one event changed: the rules that no planted bug breaks -------------------------------------------------

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """A right run with chunks, shared prefixes, retractions and evictions."""
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    spec = EngineSpec(page_size=4, num_pages=14, max_running_requests=3, max_seq_len=40, vocab_size=50)
    cache, policy = make_plugin("cache", "radix", page_size=4), make_plugin("scheduler", "mixed")
    clients = [job(u, 14, 12, first=u % 2, arrive=u) for u in range(1, 8)]
    with tight(), traced(path, spec, cache, policy, max_prefill_tokens=6) as drive:
        report = drive.run(clients)
    assert report.retractions and report.cached_tokens
    assert check(read(path)) is None
    return [json.loads(line) for line in path.read_text().splitlines()]


def first(lines: Lines, kind: str, want: Callable[[dict[str, Any]], Any] = lambda _: True) -> dict[str, Any]:
    return next(line for line in lines if line["event"] == kind and want(line))


def longer_than_the_pool(lines: Lines) -> None:
    first(lines, "add")["max_tokens"] = 60


def the_oldest_is_retracted(lines: Lines) -> None:
    at = lines.index(first(lines, "batch", lambda b: len(b["uids"]) > 1))
    lines.insert(at + 1, {"event": "retract", "step": lines[at]["step"], "uid": min(lines[at]["uids"])})


def seated_before_one_that_waits_long(lines: Lines) -> None:
    lines[0]["options"]["starvation_steps"] = 2
    add = first(lines, "add", lambda a: a["uid"] == 1)
    lines.insert(1, {**add, "uid": 99})


def a_position_twice(lines: Lines) -> None:
    first(lines, "batch", lambda b: b["decode"])["starts"][0] -= 1


def a_chunk_that_samples(lines: Lines) -> None:
    batch = first(lines, "batch", lambda b: 0 in b["sample"])
    batch["sample"][batch["sample"].index(0)] = 1


def anothers_prefix(lines: Lines) -> None:
    """The request that matches has another prompt than the one whose pages they are."""
    uid = first(lines, "match", lambda m: m["pages"])["uid"]
    first(lines, "add", lambda a: a["uid"] == uid)["prompt"][0] += 1


def a_token_is_lost(lines: Lines) -> None:
    done = first(lines, "step", lambda d: d["gained"] is None)
    done["gained"] = [0] * len(done["tokens"])


def two_pages_in_the_wrong_order(lines: Lines) -> None:
    """Both are the request's own, so that only what is read there can tell."""
    batch = first(lines, "batch", lambda b: b["decode"] and b["starts"][0] >= 12)
    slot = batch["slots"][0]
    writes = [line["table"] for line in lines[: lines.index(batch)] if line["event"] == "batch"]
    pages = {c: p for table in writes for s, c, p in zip(*table, strict=True) if s == slot}
    for more, what in zip(([slot, slot], [0, 1], [pages[1], pages[0]]), batch["table"], strict=True):
        what.extend(more)


def a_page_that_another_has(lines: Lines) -> None:
    """A table write names the page of the row beside it."""
    batch = first(lines, "batch", lambda b: len(set(b["table"][0])) > 1)
    batch["table"][2][-1] = batch["table"][2][0]


def an_answer_too_short(lines: Lines) -> None:
    uid = first(lines, "finish", lambda f: f["reason"] == "length")["uid"]
    first(lines, "add", lambda a: a["uid"] == uid)["max_tokens"] += 1


def two_replies(lines: Lines) -> None:
    at = lines.index(first(lines, "finish"))
    lines.insert(at, lines[at])


def a_third_step_in_flight(lines: Lines) -> None:
    lines[0]["options"]["overlap"] = False


def a_step_is_left_out(lines: Lines) -> None:
    at = lines.index(first(lines, "batch", lambda b: b["step"] == 5))
    lines[at]["step"] = 6


def evicted_in_use(lines: Lines) -> None:
    at = lines.index(first(lines, "match", lambda m: m["pages"]))
    lines.insert(at + 1, {"event": "evict", "step": lines[at]["step"], "pages": lines[at]["pages"][-1:]})


def a_late_token_is_kept(lines: Lines) -> None:
    """Its request was retracted while it was in flight."""
    sampled = {line["step"]: line["sample"] for line in lines if line["event"] == "batch"}
    done = first(lines, "step", lambda d: d["gained"] and [0, 1] in map(list, zip(d["gained"], sampled[d["step"]])))
    done["gained"] = sampled[done["step"]]


DOCTORED: dict[Callable[[Lines], None], tuple[str, str]] = {
    longer_than_the_pool: ("refused", "a request of 14 prompt tokens and 60 more was queued"),
    the_oldest_is_retracted: ("retraction", "the oldest of those that run"),
    seated_before_one_that_waits_long: ("starved", "is seated before it, which waits for 2 steps"),
    a_position_twice: ("row", "starts at position"),
    a_chunk_that_samples: ("row", "samples after position"),
    anothers_prefix: ("prefix", "its page 0 was matched in the cache, and that page holds the prefix of request"),
    a_token_is_lost: ("late-token", "its row sampled a token, and it did not get it"),
    a_late_token_is_kept: ("late-token", "keeps a token that was in flight when it lost its seat"),
    a_page_that_another_has: ("owner", "writes a page that is the cache's"),
    two_pages_in_the_wrong_order: ("prefix", "position 0 of its table reads the KV of another prefix"),
    an_answer_too_short: ("reply", "ended by length after 12 of 13 tokens"),
    two_replies: ("reply", "had its final reply (length)"),
    a_third_step_in_flight: ("stream", "at most 1 may be in flight"),
    a_step_is_left_out: ("stream", "step 5 was due"),
    evicted_in_use: ("owner", "is evicted while requests [1] use it"),
}


@pytest.mark.parametrize("doctor", DOCTORED, ids=lambda d: d.__name__)
def test_one_event_changed_is_found(doctor: Callable[[Lines], None], lines: Lines, tmp_path: Path) -> None:
    changed = json.loads(json.dumps(lines))
    doctor(changed)
    path = tmp_path / "changed.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in changed))
    found = check(read(path))
    print(found)
    assert found is not None
    rule, words = DOCTORED[doctor]
    assert found.rule == rule
    assert words in found.text


class Unfair:
    """Request 1 gets no row while another runs."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        rows = [
            (r.uid, n)
            for r in running
            if r.uid != 1 or len(running) == 1
            if (n := budget.grant(r, r.num_remaining_tokens or 1))
        ]
        return Plan(rows + [(w.uid, n) for w in waiting if (n := budget.grant(w, w.num_tokens - w.num_cached_tokens))])


def test_a_request_that_is_left_out_while_it_runs_is_found(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    clients = [job(1, 9, 8), job(2, 9, 50)]
    with traced(path, SPEC, make_plugin("cache", "naive", page_size=4), Unfair(), starvation_steps=512) as drive:
        drive.run(clients)
    assert check(read(path)) is None  # nobody promised less
    path.write_text(path.read_text().replace('"starvation_steps":512', '"starvation_steps":9'))
    found = check(read(path))
    assert found is not None
    assert (found.rule, found.uid) == ("starved", 1)


def test_what_is_no_trace_is_refused_and_a_half_written_line_is_left_out(lines: Lines, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_text(text[:-20])
    trace = read(path)
    assert not trace.whole
    assert len(trace.events) == len(lines) - 2
    for content, said in (
        ("", "first line must be a header"),
        ("hello\n", "line 1 is not an event"),
        (text.replace('"version": 1', '"version": 7'), "has format 7"),
    ):
        path.write_text(content)
        with pytest.raises(TraceError, match=said):
            read(path)


def test_a_run_whose_engine_died_broke_no_promise(tmp_path: Path) -> None:
    """Every request got its error; what a dead engine held is not given back any more."""
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
