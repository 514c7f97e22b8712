"""The rest of a recorded run: with the same options it is repeated event by event, with others it departs."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pluggy
import pytest

from minisgl import hooks
from minisgl.core import EngineSpec, SamplingParams
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.testing.drive import Drive, Job, make_plugin
from minisgl.testing.small import no_lookahead
from minisgl.trace import events as ev
from minisgl.trace.__main__ import main
from minisgl.trace.read import Trace, TraceError
from minisgl.trace.record import EventMaker, header
from minisgl.trace.step_times import fit
from minisgl.trace.what_if import Future, what_if
from minisgl.trace.what_if_report import measure, report

# num_pages, scheduler, cache, max_prefill_tokens, overlap, starvation_steps
SETUPS = (
    (24, "prefill_first", "radix", 5, True, 64),
    (24, "mixed", "radix", 16, True, 8),
    (60, "decode_first", "radix", 8192, True, 64),
    (24, "mixed", "naive", 5, False, 8),
    (60, "prefill_first", "radix", 16, False, 64),
)


MANAGER = PluginManager.load()


def recorded(seed: int, *, jobs: int = 12, spread: int = 30, **options: Any) -> Trace:
    """Return the record of a random run on the simulated engine."""
    rng = random.Random(seed)
    num_pages, policy, cache, chunk, overlap, starvation_steps = SETUPS[seed % len(SETUPS)]
    spec = EngineSpec(page_size=4, num_pages=num_pages, max_running_requests=4, max_seq_len=96, vocab_size=40)
    values = {"max_prefill_tokens": chunk, "overlap": overlap, "starvation_steps": starvation_steps}
    values |= {key: value for key, value in options.items() if key in values}
    policy, cache = options.get("policy", policy), options.get("cache", cache)
    words = [f"{key}={str(value).lower()}" for key, value in values.items()]
    words += [
        f"scheduler={policy}",
        f"cache={cache}",
        f"num_pages={spec.num_pages}",
        "page_size=4",
        "max_running_requests=4",
    ]
    first = header(compose(MANAGER, words), spec)
    events: list[Any] = []
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    manager.register(EventMaker(events.append))
    stems = [[rng.randrange(3) for _ in range(30)] for _ in range(2)]
    clients = []
    for uid in range(1, jobs + 1):
        prompt = rng.choice(stems)[: rng.randrange(30)] + [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
        arrive = rng.randrange(spread)
        abort = arrive + rng.randrange(12) if rng.random() < 0.25 else None
        group = uid % 3 if seed % 2 else 0  # requests of two groups, and some without
        clients.append(
            Job(uid, prompt, SamplingParams(max_tokens=rng.randrange(1, 25), seed=uid), arrive, abort, group=group)
        )
    with no_lookahead():
        drive = Drive(
            spec, make_plugin("cache", cache, page_size=4), make_plugin("scheduler", policy),
            observers=manager.hook, thorough=False, eos_ids=(3,), **values,
        )  # fmt: skip
        drive.run(clients)
    return Trace(f"run {seed}", first, events)


def plain(events: Sequence[ev.Line], stop_id: int) -> list[Any]:
    """Return events without times and checksums, and without tokens that no request gained.

    Counts of pages are left out: a turn of the loop that launches nothing and reads nothing may have some.
    """
    out = []
    for event in events:
        if isinstance(event, ev.Pool):
            continue
        fields = {name: getattr(event, name) for name in event.__struct_fields__ if name not in ("t", "checksum")}
        if isinstance(event, ev.Add):
            fields.pop("cache_salt")
        if isinstance(event, ev.Done):
            kept = event.kept or [1] * len(event.tokens)
            fields["tokens"] = [token if gained else None for token, gained in zip(event.tokens, kept, strict=True)]
            fields["tokens"] = [3 if token == stop_id else token for token in fields["tokens"]]
        out.append((type(event).__name__, fields))
    return out


RUNS = int(os.environ.get("MINISGL_WHAT_IF_RUNS", "15"))


def test_same_options_repeat_the_run() -> None:
    """Of random runs, every event after any step is that of the record."""
    for seed in range(RUNS):
        trace = recorded(seed, jobs=6, spread=16)
        steps = sum(isinstance(event, ev.Batch) for event in trace)
        same = ["overlap=true"] if seed % 2 and trace.header.options["overlap"] else []
        with no_lookahead():
            future = what_if(trace, random.Random(seed).randrange(steps), same)
        assert (future.misses, future.departs) == (None, None), f"seed {seed}"
        assert future.events == future.was, f"seed {seed}"  # the times too
        assert plain(future.events, 40) == plain(trace.events, 40), f"seed {seed}"


def batches(future: Future) -> list[list[tuple[int, int, int]]]:
    return [
        list(zip(event.uids, event.num_computed_tokens, event.num_scheduled_tokens, strict=True))
        for event in future.events
        if isinstance(event, ev.Batch)
    ]


def test_another_policy_departs_where_it_decides_otherwise() -> None:
    """Before the departure, the steps are the record's. From step 0 on, it is a new run with that policy."""
    found = 0
    for seed in range(20):
        trace = recorded(seed, policy="prefill_first", max_prefill_tokens=5, jobs=10, spread=4)
        record = batches(Future(trace.spec, 0, list(trace.events)))
        with no_lookahead():
            future = what_if(trace, 6, ["scheduler=mixed"])
        assert future.misses is None
        if future.departs is None:
            assert batches(future) == record
            continue
        found += 1
        assert future.departs >= 6
        steps = batches(future)
        assert steps[: future.departs] == record[: future.departs]
        assert steps[future.departs : future.departs + 1] != record[future.departs : future.departs + 1]
        ended = {event.uid: event.finish_reason for event in future.events if isinstance(event, ev.Finish)}
        reasons = {event.uid: event.finish_reason for event in trace if isinstance(event, ev.Finish)}
        assert ended.keys() == reasons.keys()
        assert all(ended[uid] == reason for uid, reason in reasons.items() if reason != "abort")
    assert found > 5


def test_another_pool_begins_empty() -> None:
    """The open requests run again, and gain the same tokens."""
    trace = recorded(3, cache="radix")
    with no_lookahead():
        future = what_if(trace, 10, ["page_size=8", "num_pages=12"])
    assert future.restarted
    assert (future.spec.page_size, future.spec.num_pages) == (8, 12)
    at = [event for event in trace if isinstance(event, ev.Finish) and event.step > 11]
    assert {event.uid for event in at} <= {event.uid for event in future.events if isinstance(event, ev.Finish)}


def test_answers_that_ended_are_not_computed_again() -> None:
    """With another pool, no request runs again that had ended before the step."""
    for seed in (5, 11):
        trace, ended, num_open, at = recorded(seed, jobs=5, spread=60), set[int](), 0, 0
        before: set[int] = set()
        for event in trace:
            num_open += isinstance(event, ev.Add) - isinstance(event, ev.Finish)
            if isinstance(event, ev.Finish):
                ended.add(event.uid)
            elif isinstance(event, ev.Add) and num_open == 1 and event.step:
                at, before = event.step, set(ended)
        assert before
        with no_lookahead():
            future = what_if(trace, at, ["num_pages=50"])
        again = {event.uid for event in future.events if isinstance(event, ev.Add)}
        assert again
        assert not again & before


def timed(trace: Trace, *, synchronous: bool, noise: float, delay: float = 0.0) -> Trace:
    """Give the events the times of an engine whose steps take 2 ms, 0.1 ms a prompt token and 0.2 ms a row.

    The host takes 0.5 ms between two steps. A share ``noise`` of the steps takes twenty times as long, and the server
    waits ``delay`` seconds before each step.
    """
    rng, now, last, ends = random.Random(1), 0.0, 0.0, dict[int, float]()
    for event in trace:
        if isinstance(event, ev.Batch):
            now = event.t = now + delay + 0.0005
            prompt = sum(event.num_scheduled_tokens[event.num_decode :])
            seconds = 0.002 + 0.0001 * prompt + 0.0002 * len(event.uids)
            start = now if synchronous else max(now, last)
            ends[event.step] = last = start + seconds * (20 if rng.random() < noise else 1)
            now = last if synchronous else now
        elif isinstance(event, ev.Done):
            now = event.t = max(now, ends[event.step])
        elif isinstance(event, ev.Add | ev.Finish):
            event.t = now
    return trace


@pytest.mark.parametrize("synchronous", [False, True])
def test_step_times_are_robust(synchronous: bool) -> None:
    """A fit finds the times although some steps were slow, and whether the device computes within the launch."""
    trace = timed(recorded(2, jobs=30, max_prefill_tokens=16), synchronous=synchronous, noise=0.15)
    found = fit(trace)
    assert found.synchronous == synchronous
    assert found.fixed == pytest.approx(0.002, rel=0.1)
    assert found.per_prompt_token == pytest.approx(0.0001, rel=0.1)
    assert found.per_row == pytest.approx(0.0002, rel=0.2)
    assert found.host == pytest.approx(0.0005, rel=0.1)


def test_more_from_the_cache_is_never_slower() -> None:
    """Even on a machine whose noise hides every difference, the same run without a cache is not faster."""
    for seed in (5, 10):
        trace = timed(recorded(seed, jobs=16, spread=1, cache="radix"), synchronous=True, noise=0.5)
        with no_lookahead():
            found = report(trace, 0, ["cache=naive"])
        assert found.was.cached_tokens > 0 == found.would.cached_tokens
        assert found.was.computed_tokens < found.would.computed_tokens
        ends = [
            max(e.t for e in events if isinstance(e, ev.Done)) for events in (found.future.was, found.future.events)
        ]
        assert ends[0] <= ends[1]


def test_overlap_hides_host_time() -> None:
    """Without overlap the host's time is added to each step; where a launch computes, overlap hides nothing."""
    spans = []
    for synchronous in (False, True):
        trace = timed(recorded(2, jobs=10, spread=1), synchronous=synchronous, noise=0.0)
        with no_lookahead():
            future = what_if(trace, 0, ["overlap=false"])
        spans.append([max(e.t for e in events if isinstance(e, ev.Done)) for events in (future.was, future.events)])
    (hidden, exposed), (same, without) = spans
    assert exposed > 1.1 * hidden
    assert without <= 1.05 * same


def test_refusals() -> None:
    trace = recorded(1)
    with pytest.raises(TraceError, match="has the steps 0 to"):
        what_if(trace, 10_000)
    del trace.header.options["cache"]
    with pytest.raises(TraceError, match="does not say which cache"):
        what_if(trace, 1)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = recorded(5, policy="prefill_first", max_prefill_tokens=5, jobs=10, spread=4)
    path = tmp_path / "run.jsonl"
    path.write_bytes(ev.encoder.encode_lines([trace.header, *trace.events]))
    with no_lookahead():
        assert main(["what-if", str(path), "--at", "6", "scheduler=mixed"]) == 0
        out = capsys.readouterr().out
        assert "scheduler=mixed" in out
        assert "time to first token" in out
        assert main(["what-if", str(path), "--at", "6", "max_prefill_tokens=5"]) == 0
        out = capsys.readouterr().out
        assert "The steps are the same." in out
        assert "had max_prefill_tokens=5 itself" in out
        found = report(trace, 6, [])
        assert all(was == would for _, was, would, _ in found.rows)
        assert not found.rows[0][3]
        assert main(["what-if", str(path), "--at", "6", "cache=naive"]) == 0
        assert "computed again" in capsys.readouterr().out
    assert main(["what-if", str(path), "--at", "999999"]) == 2
    assert main(["what-if", str(path), "--at", "1", "scheduler=nonsense"]) == 2


def test_drafts_are_no_tokens_of_prompts() -> None:
    """A step with a decode row, a row that verifies three drafts, and a chunk of five tokens."""
    batch = ev.Batch(
        step=3,
        t=0.0,
        uids=[1, 2, 3],
        req_pool_indices=[0, 1, 2],
        num_computed_tokens=[8, 8, 0],
        num_scheduled_tokens=[1, 4, 5],
        num_decode=1,
        num_sampled_tokens=[1, 4, 1],
        page_table_updates=([], [], []),
        checksum=0,
        drafts=[[7, 8, 9]],
    )
    assert batch.num_prompt_tokens == 5
    assert measure([batch], 4, 0, {}).computed_tokens == 5
