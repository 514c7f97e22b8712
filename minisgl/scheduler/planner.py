"""From requests to the rows of the next step: what a policy is shown, what it may not do, and what it must not forget.

Knows who waits and who runs, and asks `CacheManager` what they cost. It decides and retracts; it seats nobody and
builds no
step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Protocol

import numpy as np

from minisgl.core import I32, Req
from minisgl.scheduler.base import Plan, Running, SchedulerPolicy, Waiting
from minisgl.scheduler.budget import AdmissionCost, StepBudget, WaitingView
from minisgl.scheduler.cache_manager import CacheManager


class PolicyError(RuntimeError):
    """A policy answered with a plan that can't be carried out. Says what was wrong with it."""


def req_pool_indices_of(reqs: Sequence[Req]) -> I32:
    """Each request's slot, -1 for one that waits."""
    return np.array([req.req_pool_idx for req in reqs], np.int32)


class Requests(Protocol):
    """Who is open, as the scheduler keeps it."""

    requests: dict[int, Req]
    waiting: list[Req]  # by arrival
    next_step_id: int

    def retract(self, req: Req) -> None:
        """Take a running request's slot and pages and put it back into the queue."""


class Planner:
    """Asks the policy, and sees to promises 5 and 6 whatever it answers."""

    def __init__(
        self,
        requests: Requests,
        policy: SchedulerPolicy,
        memory: CacheManager,
        max_prefill_tokens: int,
        starvation_steps: int,
    ):
        self.requests, self.policy, self.cache_manager, self.request_table = (
            requests,
            policy,
            memory,
            memory.request_table,
        )
        self.max_prefill_tokens, self.starvation_steps = max_prefill_tokens, starvation_steps

    def next_rows(self, views: list[Running], in_flight: bool) -> Sequence[tuple[int, int]]:
        """The rows of the next step: those that were left out for too long, then the policy's."""
        if self._retract_for_starved():
            views = self.request_table.running_views(self.requests.next_step_id)
        budget = self._budget(CacheManager.LOOKAHEAD if self.requests.waiting else 0)
        forced = self._starved_rows(views, budget)
        if forced:
            taken = {uid for uid, _ in forced}
            views = [v for v in views if v.uid not in taken]
            queue = [req for req in self.requests.waiting if req.uid not in taken]
        else:
            queue = self.requests.waiting
        plan = self.policy.plan(WaitingView(len(queue), self._waiting_view_factory(queue, views)), views, budget)
        if not isinstance(plan, Plan):
            raise PolicyError(f"plan() returned a {type(plan).__name__}; it must return a Plan(rows, retract)")
        rows = [*forced, *plan.rows] if forced else plan.rows
        if plan.retract:
            rows = self._apply_retractions(plan.retract, rows)
        if not rows and not in_flight:
            # Nothing is in flight, so waiting would change nothing: the oldest goes on.
            rows = self._oldest_row()
        return rows

    def _budget(self, ahead: int) -> StepBudget:
        """All that a step may take; ``ahead`` tokens of each running request are kept from those that wait."""
        return StepBudget(
            tokens=self.max_prefill_tokens,
            rows=self.cache_manager.allocator.req_pool.num_free,
            pages=self.cache_manager.num_available_pages,
            reserve=self.request_table.page_growth(ahead) if ahead else 0,
            cost=self._cost,
        )

    def _apply_retractions(self, retract: Sequence[int], rows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Retract what the policy wants to, and return what still fits of its rows: what is retracted goes into the
        cache, so another's prompt may have less left to compute, and pages that could be evicted may be in use."""
        for uid in retract:
            req = self.requests.requests.get(uid)
            if req is None or req.req_pool_idx < 0:
                raise PolicyError(f"the plan retracts request {uid}, which does not run")
            if any(uid == other for other, _ in rows):
                raise PolicyError(f"the plan retracts request {uid} and has a row for it too")
            self.requests.retract(req)
        budget = self._budget(0)
        views: dict[int, Running | Waiting] = {
            v.uid: v for v in self.request_table.running_views(self.requests.next_step_id)
        }
        wanted = dict(rows)
        views |= {req.uid: self._waiting_view(req) for req in self.requests.waiting if req.uid in wanted}
        return [(uid, n) for uid, want in rows if (n := budget.grant(views[uid], want) if uid in views else want)]

    def _cost(self, uid: int) -> AdmissionCost:
        return self.cache_manager.admission_cost(self.requests.requests[uid])

    def _waiting_view_factory(self, queue: list[Req], views: list[Running]) -> Callable[[int], Waiting]:
        """Makes the policy's view of ``queue[i]``; asked for in order, so that a twin is always an earlier request."""
        memory, size, step = self.cache_manager, self.cache_manager.spec.page_size, self.requests.next_step_id
        computing: dict[int, int] = {}

        def claim(req: Req, page: int) -> int | None:
            page_hash = memory.next_page_hash(req, page)
            return None if page_hash is None else computing.setdefault(page_hash, req.uid)

        for view in views:
            if view.num_remaining_tokens:
                req = self.requests.requests[view.uid]
                claim(req, int(self.request_table.num_computed_tokens[req.req_pool_idx]) // size)

        def view_of(i: int) -> Waiting:
            req = queue[i]
            cached = len(memory.match(req).pages)
            first = claim(req, cached)
            twin = None if first == req.uid else first
            return Waiting(req.uid, req.arrival, len(req), cached * size, twin, step - req.queued_at_step)

        return view_of

    def _oldest_starved(self) -> Req | None:
        """The oldest waiting request, if it was left out for ``starvation_steps`` steps."""
        first = self.requests.waiting[0] if self.requests.waiting else None
        return (
            first
            if first is not None and self.requests.next_step_id - first.queued_at_step >= self.starvation_steps
            else None
        )

    def _retract_for_starved(self) -> bool:
        """Whether a running request was retracted for a late one that does not fit: the youngest of the younger ones.
        Behind older ones it is only late, not starved."""
        req = self._oldest_starved()
        if (
            req is None
            or self.cache_manager.has_pending_frees
            or self._budget(CacheManager.LOOKAHEAD).grant(self._waiting_view(req), 1)
        ):
            return False
        youngest = max(self.request_table.reqs, key=attrgetter("arrival"), default=None)
        if youngest is None or youngest.arrival < req.arrival:
            return False
        self.requests.retract(youngest)
        return True

    def _starved_rows(self, views: list[Running], budget: StepBudget) -> list[tuple[int, int]]:
        """Promise 6: whoever was left out for ``starvation_steps`` steps takes part in this one."""
        rows = [
            (v.uid, n)
            for v in views
            if v.skipped_steps >= self.starvation_steps and (n := budget.grant(v, v.num_remaining_tokens or 1))
        ]
        req = self._oldest_starved()
        if req is not None:
            view = self._waiting_view(req)
            if n := budget.grant(view, view.num_tokens - view.num_cached_tokens):
                return [*rows, (req.uid, n)]
            budget.rows = 0  # it is next: nobody else is seated before it
        return rows

    def _oldest_row(self) -> list[tuple[int, int]]:
        budget = self._budget(0)  # whatever the policy was granted: it did not use it
        for view in self.request_table.running_views(self.requests.next_step_id):
            if n := budget.grant(view, view.num_remaining_tokens or 1):
                return [(view.uid, n)]
        waiting = self._waiting_view(self.requests.waiting[0]) if self.requests.waiting else None
        if waiting is not None and (n := budget.grant(waiting, waiting.num_tokens - waiting.num_cached_tokens)):
            return [(waiting.uid, n)]
        return []

    def _waiting_view(self, req: Req) -> Waiting:
        """A waiting request on its own."""
        return self._waiting_view_factory([req], [])(0)

    def check(self, reqs: list[Req], at: I32, counts: I32) -> None:
        """Raise `PolicyError` unless the rows fit: the scheduler's own count, whatever the policy was granted. ``at``
        is `req_pool_indices_of` them, ``counts`` their tokens."""
        slots = self.request_table
        seated = at >= 0
        running, waiting = at[seated], np.flatnonzero(~seated).tolist()
        if len({id(reqs[i]) for i in waiting}) < len(waiting) or np.bincount(running, minlength=1).max() > 1:
            twice = {req.uid for req in reqs if sum(r is req for r in reqs) > 1}
            raise PolicyError(f"the plan names requests {sorted(twice)} more than once")
        computed = slots.num_computed_tokens[running]
        left = slots.num_prefill_tokens[running] - computed
        most = np.ones(len(at), np.int64)
        most[seated] = np.where(left > 0, left, computed < slots.max_len[running] - 1)
        pages = len(slots.needing_page(running[left <= 0]))
        for i in waiting:
            most[i] = len(reqs[i]) - len(self.cache_manager.match(reqs[i]).pages) * self.cache_manager.spec.page_size
            pages += self.cache_manager.admission_cost(reqs[i]).pages
        bad = np.flatnonzero((counts < 1) | (counts > most))
        if len(bad):
            i = int(bad[0])
            raise PolicyError(
                f"the plan gives request {reqs[i].uid} {int(counts[i])} tokens; it can compute "
                + (f"1 to {most[i]}" if most[i] else "none: its last token is on the way")
            )
        prefill = np.ones(len(at), bool)
        prefill[seated] = left > 0
        spent, free = int(counts[prefill].sum()), self.cache_manager.allocator.req_pool.num_free
        if spent > self.max_prefill_tokens:
            raise PolicyError(f"the plan computes {spent} prompt tokens; a step may compute {self.max_prefill_tokens}")
        if len(waiting) > free:
            raise PolicyError(f"the plan seats {len(waiting)} requests; {free} slots are free")
        if pages > self.cache_manager.num_available_pages:
            raise PolicyError(
                f"the plan takes {pages} pages; {self.cache_manager.num_available_pages} are free or evictable"
            )
