"""The starvation guard: a policy that wraps a policy, and adds to its plans the requests that it starves (promise 6).

It wraps the policy that the options select. Without it, the scheduler is correct too, but a policy may then leave a
request out forever. docs/design/admission.md says which request is starved, and why.

The guard also gives *groups* fair shares of the running requests (promise 5). All choices that one HTTP request asks
for form a group. An HTTP request may ask for a thousand choices. In order of arrival, each later request would wait
until nearly all of them have ended. So the next request to run is one of the group that has the fewest running requests
(max-min fairness); requests without a group count as groups of one. Within a priority:

- the waiting requests are ordered by their *rank*, and then by arrival. The rank of a request is the number of requests
  of its group that run or wait before it (`FairQueue`);
- the running request to retract first is one of the highest rank (`by_urgency`);
- a waiting request that finds no room takes that of running requests of a higher rank (`behind`).

If no request has a group, this is the order of arrival.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from heapq import merge
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from minisgl.config import Config
from minisgl.core import Req
from minisgl.hooks import hookimpl
from minisgl.plugins.scheduler.victims import RETRACTION_SLACK, retractions, select_victims
from minisgl.scheduler.base import Budget, Plan, Running, SchedulerPolicy, Waiting
from minisgl.scheduler.planner import WaitingView
from minisgl.scheduler.waiting_queue import NO_GROUP, WaitingQueue

if TYPE_CHECKING:
    from minisgl.scheduler.planner import Planner

_urgency, _arrival = attrgetter("urgency"), attrgetter("arrival")


class StarvationGuard:
    """Plans as ``policy`` does, and adds every request that it left out for ``starvation_steps`` steps, if it fits."""

    def __init__(self, policy: SchedulerPolicy, starvation_steps: int):
        self.policy, self.starvation_steps = policy, starvation_steps
        self._queue = FairQueue(list)
        self._oldest: Req | None = None  # the waiting request that arrived first, when the last plan was made
        self._oldest_since = 0  # the first step whose plan it was waiting for in this place
        self._claimed: Req | None = None  # the waiting request for which requests of other groups were retracted
        # Of the step that is planned now:
        self._planner: Planner | None = None
        self._forced: Req | None = None  # the waiting request that the plan must contain
        self._fits_later = False  # whether it fits when pages that are being freed have become free

    @property
    def uses_priority(self) -> bool:
        """Whether the wrapped policy uses priorities."""
        return getattr(self.policy, "uses_priority", False)

    def make_queue(self, running: Callable[[], Sequence[Req]]) -> FairQueue:
        """Return the scheduler's waiting queue. ``running()`` returns the running requests."""
        self._queue = FairQueue(running)
        return self._queue

    def victims(self, running: Sequence[Running]) -> Sequence[int]:
        """Return the uids of ``running``, the first to retract first: as the wrapped policy says, or `by_urgency`."""
        choose = getattr(self.policy, "victims", None)
        return [req.uid for req in reversed(by_urgency(self._queue.running()))] if choose is None else choose(running)

    def make_room(self, planner: Planner) -> Sequence[Req]:
        """Return the requests to retract before the plan, so that the request that it must contain fits."""
        self._planner, planner.retractions = planner, partial(retractions, planner)
        self._forced, in_the_way, self._fits_later = self._forced_admission(planner)
        if self._forced is None:
            return ()
        # The request gets the priority of the most urgent waiting request, which may be one that is retracted for it.
        # Otherwise that request would take the room back in the next step.
        most_urgent = self._queue.most_urgent()
        priority = min(req.priority for req in [self._forced, most_urgent or self._forced, *in_the_way])
        if priority < self._forced.priority:
            self._queue.set_priority(self._forced, priority)
        return in_the_way

    def _forced_admission(self, planner: Planner) -> tuple[Req | None, list[Req], bool]:
        """Return a waiting request that the next plan must contain, or None, and what its admission takes.

        That is a starved request, or else a request that claims its group's share (`_claimant`). The list has the
        running requests to retract for it. The flag says whether it fits only when pages that are being freed are free.
        """
        starved = self._oldest_starved(planner)
        if starved is not None:
            if planner.fits(starved):
                return starved, [], False
            victims = self._in_the_way(starved)
            return (None, [], False) if victims is None else (starved, victims, True)
        claimed, self._claimed = self._claimed, None
        claimant = self._claimant(planner, claimed)
        if claimant is None:
            return None, [], False
        if planner.fits(claimant):
            return (claimant if claimant is claimed else None), [], False
        kept, taken = behind(claimant, planner.request_table.reqs)
        fits, victims = select_victims(planner, [*kept, claimant, *taken], RETRACTION_SLACK)
        if not fits:
            return None, [], False
        self._claimed = claimant
        return claimant, victims, True

    def _claimant(self, planner: Planner, claimed: Req | None) -> Req | None:
        """Return the first request of the queue if another group has more running requests than its own will have.

        Also return it if requests were retracted for it before: it is then ``claimed``.
        """
        first = self._queue.most_urgent()
        num_running = Counter(req.group for req in planner.request_table.reqs)
        del num_running[NO_GROUP]
        if first is None or not num_running:
            return None
        return first if first is claimed or max(num_running.values()) > num_running[first.group] + 1 else None

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        """Return the rows of the starved requests, and then those of the wrapped policy for all other requests."""
        planner = self._planner
        assert planner is not None, "make_room() comes before plan()"
        rows = self._starved_rows(planner, running, budget)
        if self._fits_later:
            budget.rows = 0  # the policy may admit no other request into the pages that are being freed
        if not rows:
            return self.policy.plan(waiting, running, budget)
        planned = {uid for uid, _ in rows}
        running = [r for r in running if r.uid not in planned]
        num_planned = sum(planner.requests.requests[uid].req_pool_idx < 0 for uid in planned)
        others = WaitingView(len(waiting) - num_planned, (w for w in waiting if w.uid not in planned))
        plan = self.policy.plan(others, running, budget)
        return Plan([*rows, *plan.rows], plan.retract) if isinstance(plan, Plan) else plan

    def _oldest_starved(self, planner: Planner) -> Req | None:
        """Return the oldest waiting request if it had no row for ``starvation_steps`` steps, else None.

        While a more urgent request is open, it must also have been the oldest waiting one for as many steps. Otherwise
        every request of a long queue, in which all have waited that long, would take the room of the urgent request.
        """
        step, first = planner.requests.next_step_id, self._queue.first()
        if first is not self._oldest:
            self._oldest, self._oldest_since = first, step
        if first is None or step - first.queued_at_step < self.starvation_steps:
            return None
        if step - self._oldest_since < self.starvation_steps and self._is_less_urgent(planner, first):
            return None
        return first

    def _is_less_urgent(self, planner: Planner, waiting: Req) -> bool:
        """Return whether a more urgent request than ``waiting`` is open."""
        if not self.uses_priority:
            return False
        most_urgent = self._queue.most_urgent()
        return (most_urgent is not None and most_urgent.priority < waiting.priority) or any(
            req.priority < waiting.priority for req in planner.request_table.reqs
        )

    def _in_the_way(self, starved: Req) -> list[Req] | None:
        """Return the running requests that must be retracted so that ``starved`` fits, the least urgent one first.

        The list is empty if ``starved`` fits as soon as the results of launched steps have been read. Return None if it
        does not fit even beside the running requests that arrived before it: none of them overtook it, so it waits for
        them, and nothing that is done to younger requests lets it start sooner.
        """
        assert self._planner is not None
        running = sorted(self._planner.request_table.reqs, key=attrgetter("urgency"))
        older = [req for req in running if req.arrival < starved.arrival]
        younger = [req for req in running if req.arrival > starved.arrival]
        fits, victims = select_victims(self._planner, [*older, starved, *younger])
        return victims if fits else None

    def _starved_rows(self, planner: Planner, running: Sequence[Running], budget: Budget) -> list[tuple[int, int]]:
        """Return rows for the starved running requests and the starved waiting one, if they fit.

        The request that was left out for the most steps comes first: a step may have too few tokens for all of them.
        """
        requests: list[Running | Waiting] = [r for r in running if r.skipped_steps >= self.starvation_steps]
        if self._forced is not None:
            requests.append(planner.waiting_view(self._forced))
        rows = []
        for request in sorted(requests, key=attrgetter("skipped_steps"), reverse=True):
            if isinstance(request, Waiting):
                wanted = request.num_tokens - request.num_cached_tokens
            else:
                wanted = request.num_remaining_tokens or 1
            if n := budget.grant(request, wanted):
                rows.append((request.uid, n))
        return rows


# ---- groups ------------------------------------------------------------------------------------------------


class FairQueue(WaitingQueue):
    """The waiting requests by priority, rank and arrival. ``running()`` returns the running requests."""

    def __init__(self, running: Callable[[], Sequence[Req]]):
        super().__init__()
        self.running = running
        self._by_arrival: list[Req] = []
        self._groups: dict[int, list[Req]] = {}  # the requests of each group, by urgency; no entry is empty

    def add(self, req: Req) -> None:
        """Add a request, at the place of its priority, its rank and its arrival number."""
        insort(self._by_arrival, req, key=_arrival)
        if req.group == NO_GROUP:
            super().add(req)
        else:
            insort(self._groups.setdefault(req.group, []), req, key=_urgency)

    def remove(self, req: Req) -> None:
        """Remove a request. Raise KeyError if it is not in the queue."""
        if req not in self:
            raise KeyError(req.uid)
        del self._by_arrival[bisect_left(self._by_arrival, req.arrival, key=_arrival)]
        reqs = self._groups.get(req.group, self._reqs)
        del reqs[bisect_left(reqs, req.urgency, key=_urgency)]
        if req.group in self._groups and not reqs:
            del self._groups[req.group]

    def set_priority(self, req: Req, priority: int) -> None:
        """Change the priority of a request in the queue."""
        self.remove(req)
        req.priority = priority
        self.add(req)

    def first(self) -> Req | None:
        """Return the request that arrived first, whatever its priority; None if the queue is empty."""
        return self._by_arrival[0] if self._by_arrival else None

    def most_urgent(self) -> Req | None:
        """Return the first request in the order of the queue; None if the queue is empty."""
        return next(iter(self), None)

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __contains__(self, req: Req) -> bool:
        i = bisect_left(self._by_arrival, req.arrival, key=_arrival)
        return i < len(self) and self._by_arrival[i].arrival == req.arrival

    def __iter__(self) -> Iterator[Req]:
        """Yield the requests in order. The queue must not change meanwhile."""
        return self._in_turn() if self._groups else super().__iter__()

    def _in_turn(self) -> Iterator[Req]:
        num_running = Counter(req.group for req in self.running())

        def keyed(reqs: Sequence[Req], first_rank: int, step: int) -> Iterator[tuple[int, int, int, Req]]:
            return ((req.priority, first_rank + i * step, req.arrival, req) for i, req in enumerate(reqs))

        queues = [keyed(reqs, num_running[group], 1) for group, reqs in self._groups.items()]
        return (entry[-1] for entry in merge(keyed(self._reqs, 0, 0), *queues))


def ranks(running: Iterable[Req]) -> dict[int, int]:
    """Return the rank of each running request by its uid: the number of more urgent ones of its group."""
    seen: Counter[int] = Counter()
    result = {}
    for req in sorted(running, key=attrgetter("urgency")):
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


@hookimpl
def minisgl_wrap_policy(config: Config) -> Any:
    return partial(StarvationGuard, starvation_steps=config.starvation_steps)
