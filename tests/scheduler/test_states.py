"""Recurrent states on the simulated engine: each row's state has absorbed exactly its prefix, once and in order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from minisgl.core import EngineSpec
from minisgl.testing import SimViolation, planted_states, soak
from minisgl.testing.drive import Drive, make_plugin
from minisgl.testing.planted import ArrivalOrderPolicy, job
from minisgl.testing.planted_states import PLANTED_STATES
from minisgl.testing.sim_records import Row
from minisgl.testing.sim_states import SimStates
from minisgl.testing.small import no_lookahead
from minisgl.testing.soak import run_all
from minisgl.testing.traced import traced
from minisgl.trace import events as ev
from minisgl.trace.check import check
from minisgl.trace.read import read
from minisgl.trace.summary import summarize
from minisgl.trace.view import page

SPEC = EngineSpec(4, 30, 4, 64, 50, has_states=True)


def drive(spec: EngineSpec = SPEC, **options: Any) -> Drive:
    cache = make_plugin("cache", "radix", page_size=spec.page_size)
    return Drive(spec, cache, ArrivalOrderPolicy(), **{"max_prefill_tokens": 8} | options)


def trace_of(run: Callable[[], Any], module: Any, path: Path) -> SimViolation | None:
    """Call ``run`` with a `Drive` in its ``module`` that records its trace. Return its violation, if any."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(module, "Drive", lambda *a, **k: stack.enter_context(traced(path, *a, **k))))
        try:
            run()
        except SimViolation as violation:
            return violation
    return None


@pytest.mark.parametrize("what", PLANTED_STATES)
def test_planted_bug_is_found(what: str, tmp_path: Path) -> None:
    """The same workload passes without the planted bug, so the bug is the cause. Its trace shows it, too."""
    bug, path = PLANTED_STATES[what], tmp_path / "run.jsonl"
    assert trace_of(bug.run, planted_states, path) is None
    assert check(read(path)) is None
    with bug.plant():
        caught = trace_of(bug.run, planted_states, path)
    assert caught is not None and caught.rule == bug.rule
    found = check(read(path))
    assert found is not None and found.step == caught.step and found.uid == caught.uid
    assert found.rule == ("state" if bug.rule == "state" else "request-pool")


def test_traces_of_random_schedules(tmp_path: Path) -> None:
    """The trace checker raises no false alarm. A trace without loads and saves has no line for them."""
    loads = 0
    for seed in range(6):
        path = tmp_path / f"{seed}.jsonl"
        assert trace_of(lambda seed=seed: soak.run(seed, states=True), soak, path) is None  # type: ignore[misc]
        trace = read(path)
        assert check(trace) is None
        copies = [event for event in trace if isinstance(event, ev.States)]
        assert all(event.loads or event.saves for event in copies)
        loads += sum(len(event.loads) for event in copies)
        assert len(page([trace])) > 1000 and summarize(trace).steps > 0  # the viewer and the summary know such traces
    assert loads > 0


def test_random_schedules() -> None:
    totals, failed = run_all(range(40), states=True)
    assert not failed
    assert 0 < totals.accepted_drafts < totals.drafts
    assert min(totals.cached_tokens, totals.aborted, totals.retractions, totals.masks, totals.prompt_logprobs) > 0


def test_retraction() -> None:
    """A retracted request begins anew: its state had absorbed tokens that were discarded."""
    crowded = drive(EngineSpec(4, 14, 4, 56, 50, has_states=True))
    with no_lookahead():
        crowded.run([job(uid, 9, 30, first=9 * uid) for uid in range(1, 5)])
    assert crowded.report.retractions > 0


def test_rejected_drafts(tmp_path: Path) -> None:
    """They are taken back out of the state. A state that they stay in is found, and in the trace, too."""
    path, jobs = tmp_path / "run.jsonl", [job(1, 9, 30), job(2, 9, 30, arrive=5)]
    run = drive(drafts=(4, 50, 1))
    run.run(jobs)
    assert 0 < run.report.counts.accepted_drafts < run.report.counts.drafts

    def absorb(self: SimStates, row: Row, prefixes: list[int]) -> None:
        self._absorbed[row.req_pool_idx] = prefixes[-1] ^ row.stream.namespace

    with patch.object(SimStates, "absorb", absorb), pytest.raises(SimViolation, match="goes on with a state") as caught:
        drive(drafts=(4, 50, 1)).run(jobs)
    assert caught.value.rule == "state"
    cache = make_plugin("cache", "states", spec=SPEC, snapshots=4, spacing=4)
    with traced(path, SPEC, cache, ArrivalOrderPolicy(), max_prefill_tokens=8, drafts=(4, 50, 1), rounds=2) as run:
        run.run(jobs)
    assert check(read(path)) is None
    assert any(isinstance(event, ev.Batch) and event.drafts for event in read(path))


def test_equal_prompts_are_computed_at_once() -> None:
    """No request waits for the pages of another, since it can't use them."""
    equal = drive(max_prefill_tokens=64)
    equal.run([job(1, 8, 4), job(2, 8, 4), job(3, 8, 4)])
    assert len(set(equal.report.first_token.values())) == 1
