"""The scheduler's state after each event of a trace: requests, pages, page tables, radix tree, steps in flight.

`State` applies events and does not check them. It can follow a run that broke a promise, as long as its events can
still be applied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from minisgl.core import I32, EngineSpec
from minisgl.scheduler.steps import NO_TOKEN
from minisgl.trace import events as ev
from minisgl.trace.tree import PageTree

__all__ = ["CACHE", "FREE", "RETIRING", "InFlightStep", "Request", "State"]

FREE, RETIRING, CACHE = -1, -2, -3
"""Owners of pages that belong to no request. All other owners are uids."""


@dataclass
class Request:
    """State of one request."""

    uid: int
    arrival: int
    """Number of requests that were added before this request."""
    added: ev.Add
    token_ids: list[int]
    """Prompt and output."""
    queued_at_step: int
    """The step for which the request began to wait."""
    max_num_tokens: int
    """Number of prompt tokens plus ``max_tokens``."""
    req_pool_idx: int = -1
    """Row in the request pool, or -1 while the request waits."""
    admission_order: int = -1
    """Number of admissions, of any request, before the one with which this request runs; -1 while it waits."""
    num_prefill_tokens: int = 0
    """Length of the request in tokens when it was admitted last: prefill computes this many positions."""
    num_computed_tokens: int = 0
    """Positions whose KV is cached or computed by steps launched since the admission."""
    last_step: int = -1
    """The last step with a row of this request. At first, the step before the step of its admission."""
    cached_pages: list[int] = field(default_factory=list)
    """Pages of the prefix that is locked for this request, in order."""
    finish_reason: str = ""
    priority: int = 0
    """Lower is more urgent: the request's own priority, or the one that it inherited at its last admission."""

    @property
    def state(self) -> str:
        """``waiting``, ``prefill``, ``decode``, or the reason why the request ended."""
        if self.finish_reason:
            return self.finish_reason
        if self.req_pool_idx < 0:
            return "waiting"
        return "prefill" if self.num_computed_tokens < self.num_prefill_tokens else "decode"

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens that the request gained."""
        return len(self.token_ids) - len(self.added.prompt_ids)


@dataclass
class InFlightStep:
    """A launched step whose result has not been read."""

    batch: ev.Batch
    admission_orders: list[int]
    """`Request.admission_order` of each row's request at the launch."""
    pages: list[I32]
    """For each row, the pages from which it reads and to which it writes: int32 ``[pages]``."""


class State:
    """The state of a scheduler. A new state has no requests; call `apply` with each event, in order."""

    def __init__(self, spec: EngineSpec):
        self.spec = spec
        self.all_requests: dict[int, Request] = {}
        self.requests: dict[int, Request] = {}  # requests that have not ended, by arrival
        self.running: dict[int, Request] = {}  # by admission
        self.owner: I32 = np.full(spec.num_pages, FREE, np.int32)
        self.ref_counts: I32 = np.zeros(spec.num_pages, np.int32)  # requests for which a cached page is locked
        columns = -(-spec.max_seq_len // spec.page_size)
        self.page_table: I32 = np.full((spec.max_running_requests, columns), -1, np.int32)
        self.tree = PageTree()
        self.origin: dict[int, tuple[int, int]] = {}  # cached page -> (uid of first owner, index among its pages)
        self.first_tokens: dict[int, list[int]] = {}  # page that was cached when the trace began -> its token ids
        self.in_flight: deque[InFlightStep] = deque()
        self.retiring: deque[tuple[int, list[int]]] = deque()  # (step whose result must be read before, pages)
        self.last_launched = self.last_read = -1
        self.state_copies: ev.States | None = None  # recurrent states that the next step copies
        self.failed = False  # the engine failed (no grammar did): no page becomes free any more
        self._unlocks: deque[tuple[int, list[int]]] = deque()
        self._num_added = self._num_admissions = 0

    @property
    def idle(self) -> bool:
        """Whether all requests have ended and no step is in flight."""
        return not self.requests and not self.in_flight

    @property
    def next_step_id(self) -> int:
        """Number of the next step to be launched."""
        return self.last_launched + 1

    def count(self, owner: int) -> int:
        """Return the number of pages of an owner: a uid, `FREE`, `RETIRING` or `CACHE`."""
        return int((self.owner == owner).sum())

    @property
    def num_evictable_pages(self) -> int:
        """Number of cached pages that are locked for no request."""
        return int(((self.owner == CACHE) & (self.ref_counts == 0)).sum())

    def waiting(self) -> list[Request]:
        """Return the waiting requests, by arrival."""
        return [req for req in self.requests.values() if req.req_pool_idx < 0]

    def token_ids(self, pages: Sequence[int]) -> list[int]:
        """Return the token ids whose KV the cached ``pages`` hold."""
        size, out = self.spec.page_size, list[int]()
        for page in pages:
            if page in self.origin:
                uid, i = self.origin[page]
                out += self.all_requests[uid].token_ids[i * size : (i + 1) * size]
            else:
                out += self.first_tokens.get(page, [0] * size)
        return out

    def apply(self, event: ev.Line) -> None:
        """Apply an event: change the state accordingly."""
        match event:
            case ev.Now():
                self._begin(event)
            case ev.Add():
                self._add(event)
            case ev.Match():
                self._match(event)
            case ev.Admit():
                self._admit(event)
            case ev.Allocate():
                self.owner[event.pages] = event.owners
            case ev.Evict():
                self.owner[event.pages] = FREE
                self.tree.evict(event.pages)
            case ev.States():
                self.state_copies = event
            case ev.Batch():
                self._batch(event)
            case ev.Cache():
                self._cache(event)
            case ev.Free():
                self.owner[event.pages] = RETIRING
                self.retiring.append((event.step, event.pages))
                self._free_retired(self.last_read)
            case ev.Done():
                self._done(event)
            case ev.Retract() | ev.Finish():
                self._stop(event)

    # ---- the beginning, and requests ------------------------------------------------------------------

    def _begin(self, event: ev.Now) -> None:
        """Begin with the state of a trace whose recorder came late. Token ids that it does not have are 0."""
        self.__init__(self.spec)  # type: ignore[misc]
        self._num_added, self._num_admissions = event.added, event.admitted
        for each in event.requests:
            ids = event.ids.get(each.uid) or [0] * (each.prompt + each.output)
            added = ev.Add(each.added, each.uid, each.t, ids[: each.prompt], each.max, each.salt, each.priority)
            req = Request(each.uid, each.arrival, added, ids, each.queued, each.prompt + each.max, each.row, each.order)
            req.num_prefill_tokens, req.num_computed_tokens = each.prefill, each.computed
            req.cached_pages, req.priority, req.last_step = list(each.cached), each.priority, event.step - 1
            self.all_requests[each.uid] = self.requests[each.uid] = req
            if each.row >= 0:
                self.page_table[each.row, : len(each.pages)] = each.pages
        running = [req for req in self.requests.values() if req.req_pool_idx >= 0]
        self.running = {req.uid: req for req in sorted(running, key=lambda req: req.admission_order)}
        self.owner[:] = np.repeat(*np.array(event.owner, np.int32).reshape(-1, 2).T)
        self.ref_counts[:] = np.repeat(*np.array(event.refs, np.int32).reshape(-1, 2).T)
        self.tree = PageTree.of(event.tree)
        self.first_tokens = dict(event.tokens)
        self.last_launched, self.last_read = event.step - 1, event.read
        for batch in event.in_flight:
            for uid in batch.uids:  # a request that has ended may still have a row in flight
                gone = Request(uid, -1, ev.Add(-1, uid, 0.0, [], 0), [], -1, 0, finish_reason="gone")
                self.all_requests.setdefault(uid, gone)
            self._launch(batch)
        self.retiring.extend(event.retiring)
        self._unlocks.extend(event.unlocks)

    def _add(self, event: ev.Add) -> None:
        max_num_tokens = len(event.prompt_ids) + event.max_tokens
        arrival = self._num_added
        self._num_added += 1
        req = Request(event.uid, arrival, event, list(event.prompt_ids), event.step, max_num_tokens)
        req.priority = event.priority
        self.all_requests[event.uid] = self.requests[event.uid] = req

    def _match(self, event: ev.Match) -> None:
        req = self.all_requests[event.uid]
        req.cached_pages = list(event.pages)
        req.num_prefill_tokens, req.priority = event.num_tokens, event.priority
        req.num_computed_tokens = len(event.pages) * self.spec.page_size
        self.ref_counts[event.pages] += 1
        self.tree.lock(_last(event.pages), event.step)

    def _admit(self, event: ev.Admit) -> None:
        req = self.all_requests[event.uid]
        req.req_pool_idx, req.admission_order, req.last_step = event.req_pool_idx, self._num_admissions, event.step - 1
        self._num_admissions += 1
        self.running[req.uid] = req
        self.page_table[event.req_pool_idx] = -1

    def _stop(self, event: ev.Retract | ev.Finish) -> None:
        req = self.all_requests[event.uid]
        if isinstance(event, ev.Finish):
            req.finish_reason = event.finish_reason
            self.requests.pop(req.uid, None)
            self.failed = self.failed or (event.finish_reason == "error" and event.error != NO_TOKEN)
        else:
            req.queued_at_step = event.step
        if req.req_pool_idx >= 0 and not self.failed:
            self._unlocks.append((self.last_launched, req.cached_pages))
            self._free_retired(self.last_read)
        self.running.pop(req.uid, None)
        req.req_pool_idx = req.admission_order = -1
        req.cached_pages = []

    # ---- steps ---------------------------------------------------------------------------------------

    def _batch(self, event: ev.Batch) -> None:
        for row, column, page in zip(*event.page_table_updates, strict=True):  # in order: the last write wins
            self.page_table[row, column] = page
        self._launch(event)
        self.last_launched, self.state_copies = event.step, None
        verify = range(event.num_decode, event.num_decode + len(event.drafts))
        rows = zip(event.uids, event.num_computed_tokens, event.num_scheduled_tokens, strict=True)
        for i, (uid, start, count) in enumerate(rows):
            req = self.all_requests[uid]
            # The positions of drafts count once the result says that the drafts were accepted.
            req.num_computed_tokens, req.last_step = start + (1 if i in verify else count), event.step

    def _launch(self, event: ev.Batch) -> None:
        """Add a step to those in flight."""
        size, pages = self.spec.page_size, list[I32]()
        for idx, start, count in zip(
            event.req_pool_indices, event.num_computed_tokens, event.num_scheduled_tokens, strict=True
        ):
            pages.append(self.page_table[idx, : -(-(start + event.rounds * count) // size)].copy())
        reqs = [self.all_requests[uid] for uid in event.uids]
        orders = [
            req.admission_order if req.req_pool_idx == idx else -1
            for req, idx in zip(reqs, event.req_pool_indices, strict=True)
        ]
        self.in_flight.append(InFlightStep(event, orders, pages))

    def _done(self, event: ev.Done) -> None:
        step = self.in_flight.popleft()
        self._free_retired(event.step)
        batch = step.batch
        verify = range(batch.num_decode, batch.num_decode + len(batch.drafts))
        for i, (uid, gained) in enumerate(zip(batch.uids, event.gained, strict=True)):
            if gained:
                req, run = self.all_requests[uid], event.run(i, True)
                req.token_ids.extend(run)
                if i in verify:
                    req.num_computed_tokens = batch.num_computed_tokens[i] + len(run)

    def _free_retired(self, step: int) -> None:
        """Free the pages and remove the locks that waited until the result of ``step`` was read."""
        self.last_read = step
        while self.retiring and self.retiring[0][0] <= step:
            pages = self.retiring.popleft()[1]
            self.owner[pages] = FREE
        while self._unlocks and self._unlocks[0][0] <= step:
            pages = self._unlocks.popleft()[1]
            self.ref_counts[pages] -= 1
            self.tree.lock(_last(pages), step, -1)

    # ---- the cache -----------------------------------------------------------------------------------

    def _cache(self, event: ev.Cache) -> None:
        req, new_pages = self.all_requests[event.uid], set(event.pages)
        self.owner[event.pages] = CACHE
        self.origin |= {
            page: (req.uid, i) for i, page in enumerate(event.cached_pages, event.start) if page in new_pages
        }
        old_end = _last(req.cached_pages)
        # Each run of consecutive new pages becomes one node, below the last page that the cache had before.
        run: list[int] = []
        parent = old_end
        for page in event.cached_pages:
            if page in new_pages:
                run.append(page)
                continue
            if run:
                self.tree.insert(parent, run, event.step)
            run, parent = [], page
        if run:
            self.tree.insert(parent, run, event.step)
        self.ref_counts[event.cached_pages] += 1
        req.cached_pages = req.cached_pages + event.cached_pages
        self.tree.lock(_last(req.cached_pages), event.step)
        self.tree.lock(old_end, event.step, -1)


def _last(pages: Sequence[int]) -> int | None:
    return pages[-1] if pages else None
