"""Recurrent states on the simulated engine: each row's state has absorbed exactly its prefix, once and in order."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.core import EngineSpec
from minisgl.testing import SimViolation
from minisgl.testing.drive import Drive, make_plugin
from minisgl.testing.planted import ArrivalOrderPolicy, job
from minisgl.testing.planted_states import PLANTED_STATES
from minisgl.testing.small import no_lookahead
from minisgl.testing.soak import run_all

SPEC = EngineSpec(4, 30, 4, 64, 50, has_states=True)


def drive(spec: EngineSpec = SPEC, **options: Any) -> Drive:
    cache = make_plugin("cache", "radix", page_size=spec.page_size)
    return Drive(spec, cache, ArrivalOrderPolicy(), **{"max_prefill_tokens": 8} | options)


@pytest.mark.parametrize("what", PLANTED_STATES)
def test_planted_bug_is_found(what: str) -> None:
    """The same workload passes without the planted bug, so the failure is caused by the bug."""
    bug = PLANTED_STATES[what]
    bug.run()
    with bug.plant(), pytest.raises(SimViolation) as caught:
        bug.run()
    assert caught.value.rule == bug.rule


def test_random_schedules() -> None:
    totals, failed = run_all(range(40), states=True)
    assert not failed
    assert min(totals.cached_tokens, totals.aborted, totals.retractions, totals.masks, totals.prompt_logprobs) > 0


def test_retraction() -> None:
    """A retracted request begins anew: its state had absorbed tokens that were discarded."""
    crowded = drive(EngineSpec(4, 14, 4, 56, 50, has_states=True))
    with no_lookahead():
        crowded.run([job(uid, 9, 30, first=9 * uid) for uid in range(1, 5)])
    assert crowded.report.retractions > 0


def test_rejected_draft_stays_in_the_state() -> None:
    """So speculation is refused for models with states: `minisgl.plugins.models.states`."""
    with pytest.raises(SimViolation, match="goes on with a state") as caught:
        drive(drafts=(4, 50, 1)).run([job(1, 9, 30)])
    assert caught.value.rule == "state"


def test_equal_prompts_are_computed_at_once() -> None:
    """No request waits for the pages of another, since it can't use them."""
    equal = drive(max_prefill_tokens=64)
    equal.run([job(1, 8, 4), job(2, 8, 4), job(3, 8, 4)])
    assert len(set(equal.report.first_token.values())) == 1
