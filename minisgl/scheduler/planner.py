"""Plans the next step: shows the policy the requests and a budget, asks it for the rows, and checks them.

The planner reads the waiting and running requests and asks `CacheManager` how many pages they need. It changes nothing:
`Scheduler` retracts and admits requests and builds the step.

The budget counts whole pages, and it counts the cached pages that a request would lock as not evictable. Admission
keeps pages in reserve for the next tokens of the running requests (promise 5), so that an admission does not soon cause
a retraction. `StepBudget.grant` cuts a prompt into chunks (chunked prefill; SGLang: `PrefillAdder`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from itertools import islice
from math import ceil
from operator import attrgetter
from typing import Protocol, overload

import numpy as np

from minisgl.core import I32, Req
from minisgl.scheduler.base import Plan, Running, SchedulerPolicy, Waiting
from minisgl.scheduler.cache_manager import AdmissionCost, CacheManager
from minisgl.scheduler.waiting_queue import WaitingQueue

MAX_ADMISSIONS = 256
"""The largest number of requests that one step admits. An admission costs the host some 25 µs, and a turn of the loop
should take less than 10 ms. A burst of more short prompts is admitted over several steps."""

PREFILL_SHARE = 0.25
"""Decode rows leave at least this share of a step's tokens, rounded up, to prefill chunks.

Otherwise a step with as many decode rows as tokens computes no prompt, until enough answers have ended.
"""


class PolicyError(RuntimeError):
    """A policy returned a plan that the scheduler cannot execute. The message says what is wrong with the plan."""


def req_pool_indices_of(reqs: Sequence[Req]) -> I32:
    """Return the request-pool index of each request, -1 for a waiting request: int32 ``[requests]``."""
    return np.array([req.req_pool_idx for req in reqs], np.int32)


class Requests(Protocol):
    """The part of `Scheduler` that the planner uses: its open requests."""

    requests: dict[int, Req]  # open requests (waiting and running) by uid
    waiting: WaitingQueue
    next_step_id: int


class Planner:
    """Asks the policy for a plan, and checks it: promise 5 (no over-commitment) holds whatever its plans contain.

    A policy that wraps the policy may ask the planner too: `fits`, `waiting_view`.
    """

    def __init__(
        self, requests: Requests, policy: SchedulerPolicy, cache_manager: CacheManager, max_prefill_tokens: int
    ):
        self.requests, self.policy = requests, policy
        self.cache_manager, self.request_table = cache_manager, cache_manager.request_table
        self.max_prefill_tokens = max_prefill_tokens
        self.uses_priority: bool = getattr(policy, "uses_priority", False)
        self.retractions: Callable[[Sequence[int]], list[int]] | None = None  # answers `Budget.retractions`

    def make_room(self) -> Sequence[Req]:
        """Return the running requests that the policy retracts before it plans the next step."""
        make_room = getattr(self.policy, "make_room", None)
        return () if make_room is None else make_room(self)

    def plan(self, running: list[Running]) -> Plan:
        """Return the policy's plan of the next step. ``running`` are the views of the running requests.

        Raise `PolicyError` if the plan is no `Plan`, or retracts requests that it may not retract.
        """
        budget = self._budget(self.cache_manager.reserve.num_tokens if self.requests.waiting else 0)
        waiting = WaitingView(len(self.requests.waiting), self._waiting_views(self.requests.waiting, running))
        plan = self.policy.plan(waiting, running, budget)
        if not isinstance(plan, Plan):
            raise PolicyError(f"plan() returned a {type(plan).__name__}; it must return a Plan(rows, retract)")
        for i, uid in enumerate(plan.retract):
            req = self.requests.requests.get(uid)
            if req is None or req.req_pool_idx < 0 or uid in plan.retract[:i]:
                raise PolicyError(f"the plan retracts request {uid}, which is not running")
            if any(uid == other for other, _ in plan.rows):
                raise PolicyError(f"the plan retracts request {uid} and also has a row for it")
        return plan

    def _budget(self, num_reserved_tokens: int) -> StepBudget:
        """Return the budget of a whole step.

        The pages for the next ``num_reserved_tokens`` tokens of each running request are not granted to waiting ones.
        """
        return StepBudget(
            tokens=self.max_prefill_tokens,
            rows=min(self.cache_manager.allocator.req_pool.num_free, MAX_ADMISSIONS),
            pages=self.cache_manager.num_available_pages,
            reserved_pages=int(self.request_table.page_growth(num_reserved_tokens).sum()) if num_reserved_tokens else 0,
            admission_cost=self._admission_cost,
            retractions=self.retractions,
        )

    def grant_again(self, rows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return ``rows``, which may have been planned before some requests were retracted, reduced to what fits now.

        The pages of a retracted request go to the cache. So another request's prompt may have fewer tokens left to
        compute, and pages that were evictable may now be locked.
        """
        budget = self._budget(0)
        views: dict[int, Running | Waiting] = {
            v.uid: v for v in self.request_table.running_views(self.requests.next_step_id)
        }
        for uid, _ in rows:
            req = self.requests.requests.get(uid)
            if req is not None and req.req_pool_idx < 0:
                views[uid] = self.waiting_view(req)
        return [(uid, n) for uid, want in rows if (n := budget.grant(views[uid], want) if uid in views else want)]

    def _admission_cost(self, uid: int) -> AdmissionCost:
        return self.cache_manager.admission_cost(self.requests.requests[uid])

    def _waiting_views(self, waiting: Iterable[Req], running: Sequence[Running]) -> Iterator[Waiting]:
        """Return the policy's view of each request in ``waiting``, which is in order of arrival.

        The ``same_prefix_req`` of a request is one of ``running`` or a request before it.
        """
        running_reqs = (self.requests.requests[view.uid] for view in running if view.num_remaining_tokens)
        return self.cache_manager.waiting_views(waiting, running_reqs, self.requests.next_step_id)

    def victims(self) -> list[Req]:
        """Return the running requests in the order in which they are retracted when decode runs out of pages.

        The last one is the most urgent: it is never retracted for this reason, whatever the policy says (promise 5).
        """
        reqs = self.request_table.reqs
        choose = getattr(self.policy, "victims", None)
        if choose is None:
            return sorted(reqs, key=attrgetter("urgency"), reverse=True)
        uids = list(choose(self.request_table.all_views(self.requests.next_step_id)))
        by_uid = {req.uid: req for req in reqs}
        if sorted(uids) != sorted(by_uid):
            raise PolicyError(f"victims() returned {uids}; it must return each of the uids {sorted(by_uid)} once")
        exempt = min(reqs, key=attrgetter("urgency"))
        return [*(by_uid[uid] for uid in uids if uid != exempt.uid), exempt]

    def oldest_row(self) -> list[tuple[int, int]]:
        """Return a row for the earliest admitted request that fits; if none does, for the oldest waiting request."""
        running = self.request_table.running_views(self.requests.next_step_id)
        rows = [(view.uid, view.num_remaining_tokens or 1) for view in running]
        if (oldest := self.requests.waiting.first()) is not None:
            rows.append((oldest.uid, len(oldest)))
        return self.grant_again(rows)[:1]  # the rows that a step can have, cut to its first

    def fits(self, waiting: Req) -> bool:
        """Return whether a waiting request can be admitted now, beside the reserve of the running requests."""
        return self._budget(self.cache_manager.reserve.num_tokens).grant(self.waiting_view(waiting), 1) > 0

    def waiting_view(self, req: Req) -> Waiting:
        """Return the policy's view of a waiting request, as if no other request existed (no ``same_prefix_req``)."""
        return next(self._waiting_views([req], []))

    def check(self, rows: Sequence[tuple[int, int]]) -> tuple[list[Req], I32, I32]:
        """Raise `PolicyError` unless the planned rows, (uid, tokens) each, fit into one step.

        The check counts anew and ignores the budget's grants. Return the request of each row, its request-pool index
        (-1: waiting), and the tokens that the plan gives it.
        """
        uids, tokens = zip(*rows, strict=True)
        found = [self.requests.requests.get(uid) for uid in uids]
        if None in found:
            raise PolicyError(f"the plan names request {uids[found.index(None)]}, which is not open")
        if len(set(uids)) < len(uids):
            twice = sorted({uid for uid in uids if uids.count(uid) > 1})
            raise PolicyError(f"the plan names requests {twice} more than once")
        reqs: list[Req] = found  # type: ignore[assignment]
        req_pool_indices, num_tokens = req_pool_indices_of(reqs), np.array(tokens, np.int32)
        table, cache_manager = self.request_table, self.cache_manager
        waiting = np.flatnonzero(req_pool_indices < 0).tolist()
        # A waiting request has no row, and its index -1 reads the last one. The next lines replace what was read there.
        computed = table.num_computed_tokens[req_pool_indices]
        remaining = table.num_prefill_tokens[req_pool_indices] - computed
        costs = [cache_manager.admission_cost(reqs[i]).pages for i in waiting]
        cached = [len(cache_manager.match(reqs[i]).pages) * cache_manager.spec.page_size for i in waiting]
        remaining[waiting] = [len(reqs[i]) - n for i, n in zip(waiting, cached, strict=True)]
        is_prefill = remaining > 0
        limit = np.where(is_prefill, remaining, computed < table.max_len[req_pool_indices] - 1)
        bad = np.flatnonzero((num_tokens < 1) | (num_tokens > limit))
        if len(bad):
            i = int(bad[0])
            raise PolicyError(
                f"the plan gives request {reqs[i].uid} {int(num_tokens[i])} tokens; the request can compute "
                + (f"1 to {limit[i]}" if limit[i] else "none: its last token is in flight")
            )
        prefill_tokens = int(num_tokens[is_prefill].sum())
        if prefill_tokens > self.max_prefill_tokens:
            raise PolicyError(
                f"the plan computes {prefill_tokens} prompt tokens; a step may compute {self.max_prefill_tokens}"
            )
        num_free_rows = cache_manager.allocator.req_pool.num_free
        if len(waiting) > num_free_rows:
            raise PolicyError(f"the plan admits {len(waiting)} requests; {num_free_rows} request-pool rows are free")
        pages = int(table.new_pages(req_pool_indices[~is_prefill]).sum()) + sum(costs)
        if pages > cache_manager.num_available_pages:
            raise PolicyError(
                f"the plan needs {pages} pages; {cache_manager.num_available_pages} are free or evictable"
            )
        return reqs, req_pool_indices, num_tokens


# ---- what a policy sees --------------------------------------------------------------------------------


class StepBudget:
    """The scheduler's `minisgl.scheduler.base.Budget`.

    ``tokens`` and ``rows`` are what the step has left. ``pages`` is the number of free or evictable pages, and
    ``reserved_pages`` of them are kept from waiting requests, for the next tokens of running requests.
    ``admission_cost(uid)`` returns the `AdmissionCost` of a waiting request. Decode rows leave ``prefill_tokens`` of
    the tokens to prompts: by default the `PREFILL_SHARE` of ``tokens``, less what prompts were granted.
    ``retractions(uids)`` is what the method of this name calls; None: no request can be retracted.
    """

    __slots__ = ("_retractions", "admission_cost", "pages", "prefill_tokens", "reserved_pages", "rows", "tokens")

    def __init__(
        self,
        tokens: int,
        rows: int,
        pages: int,
        reserved_pages: int,
        admission_cost: Callable[[int], AdmissionCost],
        prefill_tokens: int | None = None,
        retractions: Callable[[Sequence[int]], list[int]] | None = None,
    ):
        self.tokens, self.rows, self.pages, self.reserved_pages = tokens, rows, pages, reserved_pages
        self.admission_cost, self._retractions = admission_cost, retractions
        self.prefill_tokens = ceil(tokens * PREFILL_SHARE) if prefill_tokens is None else prefill_tokens

    def copy(self) -> StepBudget:
        """Return a budget with the same numbers, whose grants do not count for this one."""
        return copy(self)

    def retractions(self, order: Sequence[Waiting | Running]) -> list[int]:
        """Return which running requests of ``order`` must be retracted, so that waiting ones of ``order`` fit."""
        return [] if self._retractions is None else self._retractions([request.uid for request in order])

    def grant(self, request: Waiting | Running, num_tokens: int) -> int:
        """Return how many of ``num_tokens`` tokens of ``request`` fit, and subtract them from the budget."""
        if isinstance(request, Waiting):
            return self._grant_admission(request, num_tokens)
        if request.num_remaining_tokens:  # prefill: all pages of the prompt were allocated at admission
            granted = max(min(num_tokens, request.num_remaining_tokens, self.tokens), 0)
            self._use_prefill_tokens(granted)
            return granted
        if request.num_new_pages > self.pages or num_tokens < 1:
            return 0
        if request.num_new_pages:
            self.pages -= request.num_new_pages
            self.reserved_pages -= request.num_new_pages
        if self.tokens > self.prefill_tokens:
            self.tokens -= 1
        return 1

    def _use_prefill_tokens(self, num_tokens: int) -> None:
        self.tokens -= num_tokens
        self.prefill_tokens = max(self.prefill_tokens - num_tokens, 0)

    def _grant_admission(self, request: Waiting, num_tokens: int) -> int:
        granted = min(num_tokens, request.num_tokens - request.num_cached_tokens, self.tokens)
        if granted <= 0 or self.rows == 0:
            return 0
        cost = self.admission_cost(request.uid)
        if cost.pages + max(self.reserved_pages, 0) > self.pages:
            return 0
        self.rows -= 1
        self._use_prefill_tokens(granted)
        self.pages -= cost.pages
        self.reserved_pages += cost.growth
        return granted


class WaitingView(Sequence[Waiting]):
    """The waiting queue as a policy sees it: ``size`` entries, each computed when it, or a later one, is first read.

    ``entries`` yields them in order, because whether an entry has a ``same_prefix_req`` depends on the earlier entries.
    An entry that is read for the first time costs some microseconds. So a policy that reads a queue of 10,000 requests
    to its end in every step delays every step by tens of milliseconds; `minisgl.plugins.scheduler` reads less.
    """

    def __init__(self, size: int, entries: Iterator[Waiting]):
        self._size = size
        self._rest = entries
        self._entries: list[Waiting] = []

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Waiting: ...
    @overload
    def __getitem__(self, index: slice) -> list[Waiting]: ...
    def __getitem__(self, index: int | slice) -> Waiting | list[Waiting]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._size))]
        if index < 0:
            index += self._size
        if not 0 <= index < self._size:
            raise IndexError(index)
        if (missing := index + 1 - len(self._entries)) > 0:
            self._entries.extend(islice(self._rest, missing))
        return self._entries[index]

    def __iter__(self) -> Iterator[Waiting]:
        yield from self._entries
        for i in range(len(self._entries), self._size):
            yield self[i]
