"""Fair shares of the running requests: all choices that one HTTP request asks for form a *group*.

An HTTP request may ask for a thousand choices. In order of arrival, each later request would wait until nearly all of
them have ended. So the next request to run is one of the group that has the fewest running requests (max-min fairness);
requests without a group count as groups of one. Within a priority:

- the waiting requests are ordered by their *rank*, and then by arrival. The rank of a request is the number of requests
  of its group that run or wait before it (`fair_order`);
- the running request to retract first is one of the highest rank (`by_urgency`);
- a waiting request that finds no room takes that of running requests of a higher rank (`behind`).

If no request has a group, this is the order of arrival.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import merge

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


def behind(waiting: Req, running: Sequence[Req]) -> tuple[list[Req], list[Req]]:
    """Return the running requests that keep their room beside ``waiting``, and those whose room it may take.

    It may take that of requests of its priority that have a higher rank than it would have: its group has then not more
    running requests than theirs.
    """
    rank, own = ranks(running), 0
    if waiting.group != NO_GROUP:
        own = sum(req.group == waiting.group for req in running)
    order = by_urgency(running)
    taken = [req for req in order if req.priority == waiting.priority and rank[req.uid] > own]
    kept = [req for req in order if req.priority != waiting.priority or rank[req.uid] <= own]
    return kept, taken
