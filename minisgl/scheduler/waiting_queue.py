"""The waiting requests in order of urgency. A request enters and leaves at any position in O(log n), amortised."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from heapq import heappop, heappush
from operator import attrgetter

from minisgl.core import Req

_urgency = attrgetter("urgency")


class WaitingQueue:
    """The waiting requests, sorted by ``Req.urgency``: by priority, and then by arrival.

    Without priorities, that is the order of arrival. A retracted request returns to the place of its first arrival.

    A removed request stays in the lists for a while, and iteration skips it. The lists are rebuilt once a ninth of
    their entries are removed requests.
    """

    def __init__(self) -> None:
        self._sorted: list[Req] = []  # by urgency; contains removed requests too
        self._waiting: dict[int, Req] = {}  # the requests in the queue, by arrival
        self._arrivals: list[int] = []  # a heap of arrival numbers; contains those of removed requests too
        self._in_heap: set[int] = set()  # its entries, each of which it has once

    def add(self, req: Req) -> None:
        """Add a request, at the place of its priority and its arrival number."""
        if self._sorted and self._sorted[-1].urgency >= req.urgency:
            i = bisect_left(self._sorted, req.urgency, key=_urgency)
            if self._sorted[i] is not req:  # else the request was removed, and its entry is still there
                self._sorted.insert(i, req)
        else:
            self._sorted.append(req)
        self._waiting[req.arrival] = req
        if req.arrival not in self._in_heap:
            self._in_heap.add(req.arrival)
            heappush(self._arrivals, req.arrival)

    def remove(self, req: Req) -> None:
        """Remove a request. Raise KeyError if it is not in the queue."""
        del self._waiting[req.arrival]
        if 8 * max(len(self._sorted), len(self._arrivals)) > 9 * len(self._waiting) + 512:
            self._sorted = list(self)
            self._arrivals = sorted(self._waiting)  # a sorted list is a heap
            self._in_heap = set(self._arrivals)

    def set_priority(self, req: Req, priority: int) -> None:
        """Change the priority of a request in the queue."""
        del self._sorted[bisect_left(self._sorted, req.urgency, key=_urgency)]
        req.priority = priority
        self.add(req)

    def clear(self) -> None:
        """Remove all requests."""
        self._sorted.clear()
        self._waiting.clear()
        self._arrivals.clear()
        self._in_heap.clear()

    def first(self) -> Req | None:
        """Return the request that arrived first, whatever its priority; None if the queue is empty."""
        while self._arrivals and self._arrivals[0] not in self._waiting:
            self._in_heap.remove(heappop(self._arrivals))
        return self._waiting[self._arrivals[0]] if self._arrivals else None

    def most_urgent(self) -> Req | None:
        """Return the first request in order of priority and then arrival; None if the queue is empty."""
        return next(iter(self), None)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, req: Req) -> bool:
        return req.arrival in self._waiting

    def __iter__(self) -> Iterator[Req]:
        """Yield the requests in order of urgency. The queue must not change meanwhile."""
        waiting = self._waiting
        return (req for req in self._sorted if req.arrival in waiting)
