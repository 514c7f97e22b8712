"""Fair shares: requests of one group together wait and run like one request, as far as other requests need the room."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.core import Req, SamplingParams
from minisgl.plugins.scheduler.guard import FairQueue, behind, by_urgency
from minisgl.testing.drive import Job
from minisgl.testing.small import job, make, no_lookahead, pool
from minisgl.testing.workloads import POLICIES


def request(arrival: int, group: int = 0, priority: int = 0) -> Req:
    req = Req(arrival, np.zeros(1, np.int32), SamplingParams(priority=priority), arrival)
    req.group = group
    return req


def arrivals(reqs: Sequence[Req]) -> list[int]:
    return [req.arrival for req in reqs]


# ---- the order ------------------------------------------------------------------------------------------------------


def test_groups_take_turns() -> None:
    queue = FairQueue(list)
    for arrival, group in enumerate([1, 1, 1, 2, 2, 0, 0]):
        queue.add(request(arrival, group))
    assert arrivals(list(queue)) == [0, 3, 5, 6, 1, 4, 2]


def test_running_requests_of_a_group_count() -> None:
    running = [request(0, 1), request(1, 1), request(2, 2)]
    queue = FairQueue(lambda: running)
    for arrival, group in ((3, 1), (4, 2), (5, 3), (6, 3), (7, 0)):
        queue.add(request(arrival, group))
    assert arrivals(list(queue)) == [5, 7, 4, 6, 3]


def test_priority_comes_before_the_turn() -> None:
    queue = FairQueue(list)
    for arrival, (group, priority) in enumerate([(1, 0), (1, 0), (0, 0), (1, -1), (0, 1)]):
        queue.add(request(arrival, group, priority))
    assert arrivals(list(queue)) == [3, 2, 0, 1, 4]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), max_size=30))
def test_order_of_running_requests(drawn: list[tuple[int, int]]) -> None:
    """The first one, which is never retracted, arrived first of the most urgent; no group overtakes another."""
    reqs = [request(arrival, group, priority) for arrival, (group, priority) in enumerate(drawn)]
    order = by_urgency(reqs)
    assert sorted(arrivals(order)) == list(range(len(reqs)))
    assert [req.priority for req in order] == sorted(req.priority for req in reqs)
    if reqs:
        assert order[0] is min(reqs, key=lambda req: req.urgency)
    for group in (1, 2, 3):
        own = [req for req in order if req.group == group]
        assert own == sorted(own, key=lambda req: req.urgency)


def test_room_is_taken_from_larger_groups_only() -> None:
    running = [request(0, 1), request(1, 1), request(2, 1), request(3, 2), request(4, 0), request(5, 1, priority=-1)]
    for group, expected in ((0, [0, 1, 2]), (1, []), (2, [1, 2]), (3, [0, 1, 2])):
        kept, taken = behind(request(9, group), running)
        assert arrivals(taken) == expected, group
        assert sorted(arrivals([*kept, *taken])) == [0, 1, 2, 3, 4, 5]


# ---- the scheduler ---------------------------------------------------------------------------------------------------


def batch(count: int, answer: int, group: int = 1, first_uid: int = 1) -> list[Job]:
    """Return ``count`` requests of a group that arrive at once."""
    return [job(first_uid + i, 5, answer, group=group) for i in range(count)]


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "static"])
@pytest.mark.parametrize("num_pages", [60, 400])
def test_a_newcomer_runs_soon(policy: str, num_pages: int) -> None:
    """A request runs a few steps after it arrives, whether a large group fills the rows (400 pages) or the pages."""
    newcomers = [job(100 + i, 5, 2, arrive=20 + 10 * i) for i in range(3)]
    report = make(policy, spec=pool(num_pages, max_running_requests=8), starvation_steps=512).run(
        [*batch(40, 60), *newcomers]
    )
    assert all(end.finish_reason == "length" for end in report.finished.values())
    waits = [report.first_token[newcomer.uid] - newcomer.arrive for newcomer in newcomers]
    assert max(waits) <= 6
    assert report.retractions >= 3


def test_without_groups_a_newcomer_waits_for_the_others() -> None:
    """The counterpart: the same requests without a group are served in order of arrival, and none is retracted."""
    report = make("prefill_first", spec=pool(400, max_running_requests=8)).run(
        [*batch(40, 60, group=0), job(100, 5, 2, arrive=20)]
    )
    assert report.first_token[100] > 200
    assert report.retractions == 0


def test_two_groups_share_the_rows() -> None:
    """A group that arrives later gets half of the rows soon, and the first one keeps the others."""
    drive = make("mixed", spec=pool(400, max_running_requests=8))
    shares = []
    for each in batch(20, 60):
        drive.add(each)
    for step in range(40):
        if step == 10:
            for each in batch(20, 60, group=2, first_uid=101):
                drive.add(each)
        drive.step()
        shares.append(sum(req.group == 2 for req in drive.scheduler.request_table.reqs))
    assert shares[25:] == [4] * 15
    assert drive.report.retractions == 0  # those that were retracted still wait


def test_promise_5_groups_and_pages() -> None:
    """When decode runs out of pages, a member of the larger group is retracted, although a younger request runs."""
    with no_lookahead():
        report = make("mixed", spec=pool(18)).run([*batch(3, 24), job(9, 5, 24, arrive=1)])
    assert report.counts.admissions[9] == report.counts.admissions[1] == 1
    assert report.retractions > 0


def test_promise_6_a_group_does_not_starve() -> None:
    """While requests without a group arrive all the time, the requests of a group get its share one after the other."""
    stream = [job(100 + i, 5, 12, arrive=2 * i) for i in range(150)]
    report = make("prefill_first", spec=pool(60, max_running_requests=2), starvation_steps=10_000).run(
        [*batch(6, 12), *stream]
    )
    last_of_group = max(report.first_token[uid] for uid in range(1, 7))
    assert last_of_group < max(report.first_token[each.uid] for each in stream) / 2
