"""Bugs of real servers, planted into the scheduler: the simulated engine, `Drive` or the page allocator finds each.

This is a test of the tests. The same workload passes without the planted bug, so the failure is caused by the bug.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from minisgl.testing import SimViolation
from minisgl.testing.drive import Drive
from minisgl.testing.planted import PLANTED, ArrivalOrderPolicy, planted
from minisgl.testing.workloads import jobs, setups


@pytest.mark.parametrize("what", PLANTED)
def test_planted_bug_is_found(what: str) -> None:
    bug = PLANTED[what]
    with planted():
        bug.run()
    with planted(bug.plant), pytest.raises(AssertionError, match=bug.oracle) as caught:
        bug.run()
    if isinstance(caught.value, SimViolation):
        assert caught.value.rule == bug.oracle


@pytest.mark.parametrize("what", PLANTED)
def test_random_workloads_find_the_bug(what: str) -> None:
    """At most 1,500 random workloads are needed to find each planted bug."""
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
        Drive(spec, cache, ArrivalOrderPolicy(), thorough=False, **options).run(clients)

    with planted(PLANTED[what].plant), pytest.raises((AssertionError, ValueError)):
        any_workload()
    print(f"{what}: found in run {runs}")
