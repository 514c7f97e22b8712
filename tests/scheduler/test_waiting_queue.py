"""The waiting queue keeps the order of arrival, and finds a request without comparing it with all others."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.core import Req, SamplingParams
from minisgl.plugins.scheduler.guard import FairQueue
from minisgl.scheduler.waiting_queue import WaitingQueue

PARAMS = SamplingParams()
QUEUES: dict[str, Callable[[], WaitingQueue]] = {"plain": WaitingQueue, "fair": lambda: FairQueue(list)}
"""Name → a new queue. Without groups, both have the same order."""

each_queue = pytest.mark.parametrize("new_queue", QUEUES.values(), ids=QUEUES)


def request(arrival: int) -> Req:
    return Req(arrival, np.zeros(1, np.int32), PARAMS, arrival)


@each_queue
@given(st.lists(st.integers(0, 60), max_size=200))
def test_queue_is_sorted_by_arrival(new_queue: Callable[[], WaitingQueue], toggled: list[int]) -> None:
    """Requests that leave and return in any order are iterated by arrival, as in a sorted list."""
    requests = [request(i) for i in range(61)]
    queue, expected = new_queue(), set()
    for i in toggled:
        if i in expected:
            queue.remove(requests[i])
        else:
            queue.add(requests[i])
        expected ^= {i}
        assert [req.arrival for req in queue] == sorted(expected)
        first = queue.first()
        assert (first.arrival if first else None) == min(expected, default=None)
        assert len(queue) == len(expected)
        assert (requests[i] in queue) == (i in expected)
    queue.clear()
    assert len(queue) == 0 and queue.first() is None


@each_queue
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(-2, 2)), max_size=200))
def test_queue_is_sorted_by_urgency(new_queue: Callable[[], WaitingQueue], events: list[tuple[int, int]]) -> None:
    """An event adds a request; or removes it if the number is 0; or else changes its priority, if it waits."""
    requests = [request(i) for i in range(41)]
    for req in requests:
        req.priority = req.arrival % 3
    queue, expected = new_queue(), set[int]()
    for i, number in events:
        if i not in expected:
            queue.add(requests[i])
            expected.add(i)
        elif number == 0:
            queue.remove(requests[i])
            expected.remove(i)
        elif isinstance(queue, FairQueue):
            queue.set_priority(requests[i], number)
        order = sorted(expected, key=lambda i: (requests[i].priority, i))
        assert [req.arrival for req in queue] == order
        first = queue.first()
        if isinstance(queue, FairQueue):
            most_urgent = queue.most_urgent()
            assert (most_urgent.arrival if most_urgent else None) == (order[0] if order else None)
            order = sorted(order)
        assert (first.arrival if first else None) == (order[0] if order else None)


@each_queue
def test_removed_request_is_unknown(new_queue: Callable[[], WaitingQueue]) -> None:
    queue = new_queue()
    queue.add(request(0))
    queue.remove(request(0))
    with pytest.raises(KeyError):
        queue.remove(request(0))


def test_cost_of_removal() -> None:
    """The removal of 32 times as many requests takes less than 32 * 10 times as long."""

    def seconds(count: int) -> float:
        queue = WaitingQueue()
        requests = [request(i) for i in range(count)]
        for req in requests:
            queue.add(req)
        begin = time.process_time()
        for req in reversed(requests):
            queue.remove(req)
        return time.process_time() - begin

    # The shortest of several times: in the others, other processes may have used the cache of the processor.
    # A search in all requests would take 32 * 32 times as long.
    small, large = min(seconds(1_000) for _ in range(5)), min(seconds(32_000) for _ in range(4))
    assert large < 32 * 10 * small, f"{small * 1e3:.1f} ms for 1,000, {large * 1e3:.1f} ms for 32,000"
