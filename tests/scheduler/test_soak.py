"""Random schedules of the soak, with fixed seeds: the same check that `make soak` makes with more of them."""

from __future__ import annotations

import pytest

from minisgl.testing.planted import PLANTED, planted
from minisgl.testing.soak import main, run, run_all, short_soak

PARTS = 10  # tests, so that several processes can share the work


@pytest.mark.parametrize("part", range(PARTS))
def test_random_schedules(part: int) -> None:
    totals, failed = run_all(short_soak()[part::PARTS])
    assert not failed
    assert totals.schedules == 50
    print(totals)
    assert min(totals.aborted, totals.cached_tokens, totals.accepted_drafts, totals.masks, totals.prompt_logprobs) > 0
    assert totals.accepted_drafts < totals.drafts
    assert totals.later_rounds > 0
    assert totals.stored_blocks > totals.removed_blocks > 0


@pytest.mark.parametrize("part", range(PARTS // 2))
@pytest.mark.parametrize("speculation", ["ngram", "suffix"])
def test_random_schedules_with_a_proposer(speculation: str, part: int) -> None:
    """The same schedules, whose drafts come from a plugin, half of them from each; their number adapts."""
    totals, failed = run_all(short_soak(speculation)[part :: PARTS // 2], speculation)
    assert not failed
    assert totals.schedules == 52
    print(totals)
    assert totals.drafts > totals.accepted_drafts > 0


def test_a_failed_schedule_is_reported_with_its_seed(capsys: pytest.CaptureFixture[str]) -> None:
    bug = PLANTED["tokens after a rejected draft that count"]
    with planted(bug.plant):
        _, failed = run_all(range(20))
        assert failed
        seed, text = failed[0]
        with pytest.raises(AssertionError):
            run(seed)
    assert "promise 8" in text or "start" in text or "expected tokens" in text
    assert main(["--schedules", "2", "--seed", str(seed), "--processes", "1"]) == 0
    assert "0 failed" in capsys.readouterr().out


def test_both_proposers_share_the_schedules() -> None:
    halves = [set(short_soak(speculation)) for speculation in ("ngram", "suffix")]
    assert halves[0] | halves[1] == set(short_soak()) == set(range(500))
    for half in halves:
        assert {(seed % 9, seed % 2) for seed in half} == {(a, b) for a in range(9) for b in range(2)}
