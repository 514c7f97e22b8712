"""`scheduler=priority`: decode rows and prefill chunks in one batch, the most urgent requests first.

A request's ``priority`` is an integer, and lower is more urgent, as in vLLM. Requests of one priority are served in
order of arrival. When request-pool rows or pages are full, a waiting request takes the room of less urgent running
requests, which are retracted: they keep their output, and continue later. A request never takes the room of another one
with the same priority. `docs/design/admission.md` says how priorities and the starvation guard agree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, takewhile
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.plugins.scheduler import MAX_SKIPPED
from minisgl.scheduler import Budget, Plan, Running, Waiting


@dataclass
class Priority:
    """Mixed batches in order of priority and arrival. Urgent requests take the room of less urgent running ones."""

    preempt: bool = True
    """Whether a waiting request may take the room of less urgent running requests. Otherwise it waits for room."""

    def build(self) -> PriorityPolicy:
        return PriorityPolicy(self.preempt)


class PriorityPolicy:
    """Plans rows in order of priority, and retracts less urgent requests to admit more urgent ones."""

    uses_priority = True
    MAX_PREEMPTING = 32
    """In one step, room is made for at most this many waiting requests."""

    def __init__(self, preempt: bool = True):
        self.preempt = preempt

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        rows: dict[int, int] = {}
        views = {r.uid: r for r in running}

        def compute(request: Running) -> None:
            if request.uid not in rows and (n := budget.grant(request, request.num_remaining_tokens or 1)):
                rows[request.uid] = n

        queue = iter(waiting)
        retract: list[int] = []
        for request in _by_urgency(running, queue):
            if isinstance(request, Running):
                compute(request)
            elif request.same_prefix_req is not None:
                # It waits for the pages of another prompt, which is as urgent as the requests that wait for it.
                if (other := views.get(request.same_prefix_req)) is not None:
                    compute(other)
            elif n := budget.grant(request, request.num_tokens - request.num_cached_tokens):
                rows[request.uid] = n
            else:
                if budget.tokens and self.preempt:
                    retract = self._preempt(chain([request], queue), running, budget, rows)
                break
        for request in sorted(running, key=_urgency):
            compute(request)
        return Plan([(uid, n) for uid, n in rows.items() if uid not in retract], retract)

    def _preempt(
        self, waiting: Iterable[Waiting], running: Sequence[Running], budget: Budget, rows: dict[int, int]
    ) -> list[int]:
        """Return the running requests to retract for the first ``waiting`` requests, and add rows for these."""
        least_urgent = max((r.priority for r in running), default=0)
        urgent = [
            w
            for w in islice(takewhile(lambda w: w.priority < least_urgent, waiting), self.MAX_PREEMPTING)
            if w.same_prefix_req is None
        ]
        if not urgent:
            return []
        # Of one priority, the running requests come first.
        order: list[Running | Waiting] = [*sorted(running, key=_rank), *urgent]
        order.sort(key=lambda request: request.priority)
        retract = budget.retractions(order)
        if retract:
            rows.update((w.uid, w.num_tokens - w.num_cached_tokens) for w in urgent)
        return retract


def _rank(request: Running) -> tuple[int, int]:
    return request.priority, request.arrival


def _urgency(request: Running | Waiting) -> tuple[int, bool, int]:
    """Order by priority, then decode rows before prompts, then by arrival."""
    is_decode = isinstance(request, Running) and not request.num_remaining_tokens
    return request.priority, not is_decode, request.arrival


def _by_urgency(running: Iterable[Running], queue: Iterator[Waiting]) -> Iterator[Running | Waiting]:
    """Merge both by urgency. Stop at the `MAX_SKIPPED`-th waiting request that should wait for another's prefix."""
    left = deque(sorted(running, key=_urgency))
    skipped = 0
    for w in queue:
        while left and _urgency(left[0]) < _urgency(w):
            yield left.popleft()
        yield w
        if w.same_prefix_req is not None and (skipped := skipped + 1) == MAX_SKIPPED:
            return


@hookimpl
def minisgl_configs() -> Any:
    yield "scheduler", "priority", Priority
