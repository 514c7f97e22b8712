"""Bugs that real servers had, planted into the real scheduler: each is found, by the right rule or the right book.

A test of the tests: the same workload passes on the healthy scheduler, so it is the planted bug that is seen.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from minisgl.testing import SimViolation
from minisgl.testing.drive import Drive
from minisgl.testing.planted import PLANTED, Hasty, planted
from minisgl.testing.workloads import jobs, setups


@pytest.mark.parametrize("what", PLANTED)
def test_the_planted_bug_is_found_and_the_healthy_run_passes(what: str) -> None:
    bug = PLANTED[what]
    with planted():
        bug.run()
    with planted(bug.plant), pytest.raises(AssertionError, match=bug.oracle) as caught:
        bug.run()
    if isinstance(caught.value, SimViolation):
        assert caught.value.rule == bug.oracle


@pytest.mark.parametrize("what", PLANTED)
def test_random_workloads_find_the_planted_bug_too(what: str) -> None:
    runs = 0

    @settings(
        max_examples=1500,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def any_workload(data: st.DataObject) -> None:
        nonlocal runs
        runs += 1
        setup = data.draw(setups())
        spec, cache, _, options = setup.build()
        clients = data.draw(jobs(setup))
        Drive(spec, cache, Hasty(), thorough=False, **options).run(clients)

    with planted(PLANTED[what].plant), pytest.raises((AssertionError, ValueError)):
        any_workload()
    print(f"{what}: found in run {runs}")
