"""Bugs of real servers, planted into the scheduler: the simulated engine, `Drive` or the page allocator finds each.

This is a test of the tests. The same workload passes without the planted bug, so the failure is caused by the bug.
"""

from __future__ import annotations

import pytest

from minisgl.testing import SimViolation
from minisgl.testing.planted import PLANTED, planted
from minisgl.testing.soak import run, short_soak


@pytest.mark.parametrize("what", PLANTED)
def test_planted_bug_is_found(what: str) -> None:
    bug = PLANTED[what]
    with planted():
        bug.run()
    with planted(bug.plant), pytest.raises(AssertionError, match=bug.oracle) as caught:
        bug.run()
    if isinstance(caught.value, SimViolation):
        assert caught.value.rule == bug.oracle


_RARE = "KV of a rejected draft that is cached"
BEGIN = {(_RARE, None): 290, (_RARE, "ngram"): 480, (_RARE, "suffix"): 480}
"""The schedule to begin with, for bugs that are rarely revealed, and with which proposer. All others: 0."""


@pytest.mark.parametrize("what", PLANTED)
def test_random_schedules_find_the_bug(what: str) -> None:
    """One of the schedules of ``test_soak.py`` reveals each planted bug."""
    find(what, None)


@pytest.mark.parametrize("speculation", ["ngram", "suffix"])
@pytest.mark.parametrize("what", [what for what in PLANTED if PLANTED[what].drafts])
def test_bugs_of_speculation_are_found_with_a_proposer(what: str, speculation: str) -> None:
    """One of the schedules that ``test_soak.py`` runs with a proposer reveals each bug."""
    find(what, speculation)


def find(what: str, speculation: str | None) -> None:
    begin = BEGIN.get((what, speculation), 0)
    with planted(PLANTED[what].plant):
        found = next((s for s in short_soak(speculation) if s >= begin and reveals(s, speculation)), None)
    print(f"{what}, {speculation}: found by schedule {found}")
    assert found is not None


def reveals(seed: int, speculation: str | None = None) -> bool:
    """Return whether the schedule with this seed fails."""
    try:
        run(seed, speculation)
    except (AssertionError, ValueError, LookupError):
        return True
    return False
