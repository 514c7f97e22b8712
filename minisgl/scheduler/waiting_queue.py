"""The waiting requests in order of arrival. A request enters and leaves at any position in O(log n), amortised."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter

from minisgl.core import Req

_arrival = attrgetter("arrival")


class WaitingQueue:
    """The waiting requests, sorted by ``Req.arrival``. A retracted request returns to the place of its first arrival.

    A removed request stays in the list for a while, and iteration skips it. The list is rebuilt once a ninth of its
    entries are removed requests.
    """

    def __init__(self) -> None:
        self._sorted: list[Req] = []  # by arrival; contains removed requests too
        self._waiting: dict[int, Req] = {}  # the requests in the queue, by arrival

    def add(self, req: Req) -> None:
        """Add a request, at the place of its arrival number."""
        if self._sorted and self._sorted[-1].arrival >= req.arrival:
            i = bisect_left(self._sorted, req.arrival, key=_arrival)
            if self._sorted[i] is not req:  # else the request was removed, and its entry is still there
                self._sorted.insert(i, req)
        else:
            self._sorted.append(req)
        self._waiting[req.arrival] = req

    def remove(self, req: Req) -> None:
        """Remove a request. Raise KeyError if it is not in the queue."""
        del self._waiting[req.arrival]
        if 8 * len(self._sorted) > 9 * len(self._waiting) + 512:
            self._sorted = list(self)

    def clear(self) -> None:
        """Remove all requests."""
        self._sorted.clear()
        self._waiting.clear()

    def first(self) -> Req | None:
        """Return the request that arrived first; None if the queue is empty."""
        return next(iter(self), None)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, req: Req) -> bool:
        return req.arrival in self._waiting

    def __iter__(self) -> Iterator[Req]:
        """Yield the requests in order of arrival. The queue must not change meanwhile."""
        waiting = self._waiting
        return (req for req in self._sorted if req.arrival in waiting)
