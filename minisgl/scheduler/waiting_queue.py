"""The waiting requests in order of urgency. A request enters and leaves at any position in O(log n), amortised.

All choices that one HTTP request asks for form a *group*, and groups have fair shares of the running requests. An HTTP
request may ask for a thousand choices. In order of arrival, each later request would wait until nearly all of them have
ended. So the next request to run is one of the group that has the fewest running requests (max-min fairness); requests
without a group count as groups of one. Within a priority:

- the waiting requests are ordered by their *rank*, and then by arrival. The rank of a request is the number of requests
  of its group that run or wait before it (`fair_order`);
- the running request to retract first is one of the highest rank (`by_urgency`);
- with the starvation guard, a waiting request that finds no room takes that of running requests of a higher rank.

If no request has a group, this is the order of arrival.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush, merge
from operator import attrgetter

from minisgl.core import Req

NO_GROUP = 0
"""The group of a request that counts as a group of its own."""


def fair_order(alone: Iterable[Req], groups: Mapping[int, Iterable[Req]], running: Sequence[Req]) -> Iterator[Req]:
    """Yield waiting requests by priority, rank and arrival.

    ``alone`` are those without a group, ``groups`` the others by group, each in order of urgency.
    """
    num_running = Counter(req.group for req in running)

    def keyed(reqs: Iterable[Req], first_rank: int, step: int) -> Iterator[tuple[int, int, int, Req]]:
        return ((req.priority, first_rank + i * step, req.arrival, req) for i, req in enumerate(reqs))

    queues = [keyed(reqs, num_running[group], 1) for group, reqs in groups.items()]
    return (entry[-1] for entry in merge(keyed(alone, 0, 0), *queues))


def ranks(running: Iterable[Req]) -> dict[int, int]:
    """Return the rank of each running request by its uid: the number of more urgent ones of its group."""
    seen: Counter[int] = Counter()
    result = {}
    for req in sorted(running, key=lambda req: req.urgency):
        result[req.uid] = seen[req.group]
        seen[req.group] += req.group != NO_GROUP
    return result


def by_urgency(running: Sequence[Req]) -> list[Req]:
    """Return the running requests by priority, rank and arrival. The first one arrived first of its priority."""
    rank = ranks(running)
    return sorted(running, key=lambda req: (req.priority, rank[req.uid], req.arrival))


_urgency = attrgetter("urgency")


class _SortedReqs:
    """Requests sorted by ``Req.urgency``.

    A removed request stays in the list for a while, and iteration skips it. The list is rebuilt once a ninth of its
    entries are removed requests.
    """

    def __init__(self) -> None:
        self._entries: list[Req] = []  # by urgency; contains removed requests too
        self._arrivals: set[int] = set()  # the arrival numbers of the requests that were not removed

    def add(self, req: Req) -> None:
        if self._entries and self._entries[-1].urgency >= req.urgency:
            i = bisect_left(self._entries, req.urgency, key=_urgency)
            if self._entries[i] is not req:  # else the request was removed, and its entry is still there
                self._entries.insert(i, req)
        else:
            self._entries.append(req)
        self._arrivals.add(req.arrival)

    def remove(self, req: Req) -> None:
        self._arrivals.remove(req.arrival)
        if 8 * len(self._entries) > 9 * len(self._arrivals) + 512:
            self._entries = list(self)

    def discard(self, req: Req) -> None:
        """Remove a request together with its entry, so that its urgency may change."""
        del self._entries[bisect_left(self._entries, req.urgency, key=_urgency)]
        self._arrivals.remove(req.arrival)

    def __len__(self) -> int:
        return len(self._arrivals)

    def __iter__(self) -> Iterator[Req]:
        arrivals = self._arrivals
        return (req for req in self._entries if req.arrival in arrivals)


class WaitingQueue:
    """The waiting requests, sorted by ``Req.urgency``: by priority, and then by arrival.

    Without priorities, that is the order of arrival. A retracted request returns to the place of its first arrival.
    While requests of groups wait, the order is that of `fair_order`. ``running()`` returns the running requests.
    """

    def __init__(self, running: Callable[[], Sequence[Req]] = tuple) -> None:
        self._running = running
        self._sorted = _SortedReqs()  # the requests without a group
        self._groups: dict[int, _SortedReqs] = {}  # the others, by group; no entry is empty
        self._waiting: dict[int, Req] = {}  # the requests in the queue, by arrival
        self._arrivals: list[int] = []  # a heap of arrival numbers; contains those of removed requests too
        self._in_heap: set[int] = set()  # its entries, each of which it has once

    def _of_group(self, group: int) -> _SortedReqs:
        return self._sorted if group == NO_GROUP else self._groups.setdefault(group, _SortedReqs())

    def add(self, req: Req) -> None:
        """Add a request, at the place of its priority and its arrival number."""
        self._of_group(req.group).add(req)
        self._waiting[req.arrival] = req
        if req.arrival not in self._in_heap:
            self._in_heap.add(req.arrival)
            heappush(self._arrivals, req.arrival)

    def remove(self, req: Req) -> None:
        """Remove a request. Raise KeyError if it is not in the queue."""
        del self._waiting[req.arrival]
        reqs = self._of_group(req.group)
        reqs.remove(req)
        if not reqs:
            self._groups.pop(req.group, None)
        if 8 * len(self._arrivals) > 9 * len(self._waiting) + 512:
            self._arrivals = sorted(self._waiting)  # a sorted list is a heap
            self._in_heap = set(self._arrivals)

    def set_priority(self, req: Req, priority: int) -> None:
        """Change the priority of a request in the queue."""
        reqs = self._of_group(req.group)
        reqs.discard(req)
        req.priority = priority
        reqs.add(req)

    def clear(self) -> None:
        """Remove all requests."""
        self._sorted = _SortedReqs()
        self._groups.clear()
        self._waiting.clear()
        self._arrivals.clear()
        self._in_heap.clear()

    def first(self) -> Req | None:
        """Return the request that arrived first, whatever its priority; None if the queue is empty."""
        while self._arrivals and self._arrivals[0] not in self._waiting:
            self._in_heap.remove(heappop(self._arrivals))
        return self._waiting[self._arrivals[0]] if self._arrivals else None

    def most_urgent(self) -> Req | None:
        """Return the first request in the order of the queue; None if the queue is empty."""
        return next(iter(self), None)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, req: Req) -> bool:
        return req.arrival in self._waiting

    def __iter__(self) -> Iterator[Req]:
        """Yield the requests in order of urgency. The queue must not change meanwhile."""
        return fair_order(self._sorted, self._groups, self._running()) if self._groups else iter(self._sorted)
