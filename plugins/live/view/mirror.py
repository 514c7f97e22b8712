"""The scheduler's present state, as far as an observer can know it, kept up to date whether a page is open or not.

`minisgl.trace.state.State` follows the events of a trace, with every token. This module follows the hooks, and does
little work for each: a page that is opened later needs only the state at that moment (`Mirror.now`), and the events
from then on. What a `Req` knows is read from it at that moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minisgl.core import I32, EngineSpec, Req, Step, StepResult
from minisgl.scheduler.request_table import Reserve
from minisgl.scheduler.steps import NO_TOKEN
from minisgl.trace import events as ev
from minisgl.trace.record import batch_event
from minisgl.trace.state import CACHE, FREE, RETIRING
from minisgl.trace.tree import PageTree

MAX_TEXT_PAGES = 4096
"""The largest number of cached pages whose token ids a state has."""


@dataclass
class _Open:
    """What is known of an open request beside its `Req`."""

    req: Req
    added: int
    t: float
    num_prefill_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = -1
    admitted_t: float = 0.0
    first_t: float = 0.0
    retractions: int = 0
    cached_pages: list[int] = field(default_factory=list)


class Mirror:
    """The state of one scheduler. Each method is called by the hook of its name, with the hook's arguments."""

    def __init__(self, spec: EngineSpec):
        self.spec = spec
        self.open: dict[int, _Open] = {}
        self.in_flight: deque[tuple[Step, list[Req], float]] = deque()  # step, requests of its rows, time of its launch
        self.next_step = 0
        self._last_read = -1
        self._owner: I32 = np.full(spec.num_pages, FREE, np.int32)
        self._ref_counts: I32 = np.zeros(spec.num_pages, np.int32)
        columns = -(-spec.max_seq_len // spec.page_size)
        self._page_table: I32 = np.full((spec.max_running_requests, columns), -1, np.int32)
        self._tree = PageTree()
        self.tokens: dict[int, I32] = {}
        """Cached page → the token ids whose KV it holds, int32 ``[page_size]``."""
        self._retiring: deque[tuple[int, I32]] = deque()
        self._unlocks: deque[tuple[int, list[int]]] = deque()
        self._reserve = Reserve(spec.max_seq_len)
        self._failed = False
        self._num_added = self._num_admitted = 0
        self._without_token: set[int] = set()  # open requests that have no token yet

    # ---- requests ------------------------------------------------------------------------------------

    def request_added(self, req: Req, now: float) -> None:
        self.open[req.uid] = _Open(req, self.next_step, now)
        self._without_token.add(req.uid)
        self._num_added += 1

    def prefix_matched(self, req: Req, pages: I32, step: int) -> None:
        entry = self.open[req.uid]
        entry.cached_pages = pages.tolist()
        entry.num_prefill_tokens, entry.num_computed_tokens = len(req), len(pages) * self.spec.page_size
        if entry.num_cached_tokens < 0:
            entry.num_cached_tokens = entry.num_computed_tokens
        self._ref_counts[pages] += 1
        self._tree.lock(_last(entry.cached_pages), step)

    def request_retracted(self, req: Req, step: int) -> None:
        entry = self.open[req.uid]
        entry.retractions += 1
        self._reserve.pages_ran_out()  # the usual reason; the other one is to serve a starved request
        entry.num_computed_tokens = 0
        self._unlock(entry)

    def request_finished(self, req: Req, now: float) -> None:
        self._failed = self._failed or (req.finish_reason == "error" and req.error != NO_TOKEN)
        if req.finish_reason != "abort":
            self._reserve.answer_ended(len(req.output_ids))
        self._without_token.discard(req.uid)
        self._unlock(self.open.pop(req.uid))

    def _unlock(self, entry: _Open) -> None:
        if entry.cached_pages and not self._failed:
            self._unlocks.append((self.next_step - 1, entry.cached_pages))
            self._free_retired()
        entry.cached_pages = []

    # ---- pages ---------------------------------------------------------------------------------------

    def pages_allocated(self, owners: I32, pages: I32) -> None:
        self._owner[pages] = owners

    def pages_evicted(self, pages: I32) -> None:
        self._owner[pages] = FREE
        listed = pages.tolist()
        self._tree.evict(listed)
        for page in listed:
            self.tokens.pop(page, None)

    def pages_freed(self, step: int, pages: I32) -> None:
        self._owner[pages] = RETIRING
        self._retiring.append((step, pages.copy()))
        self._free_retired()

    def pages_cached(self, step: int, req: Req, pages: I32, start: int, cached_pages: I32) -> None:
        entry, size = self.open[req.uid], self.spec.page_size
        self._owner[pages] = CACHE
        new, listed = set(pages.tolist()), cached_pages.tolist()
        tokens = req.tokens()[start * size : (start + len(listed)) * size].reshape(-1, size)
        old_end = _last(entry.cached_pages)
        run: list[int] = []
        parent = old_end
        for i, page in enumerate(listed):
            if page in new:
                run.append(page)
                self.tokens[page] = tokens[i].copy()
                continue
            if run:
                self._tree.insert(parent, run, step)
            run, parent = [], page
        if run:
            self._tree.insert(parent, run, step)
        self._ref_counts[cached_pages] += 1
        entry.cached_pages = entry.cached_pages + listed
        self._tree.lock(_last(entry.cached_pages), step)
        self._tree.lock(old_end, step, -1)

    def _free_retired(self) -> None:
        while self._retiring and self._retiring[0][0] <= self._last_read:
            self._owner[self._retiring.popleft()[1]] = FREE
        while self._unlocks and self._unlocks[0][0] <= self._last_read:
            pages = self._unlocks.popleft()[1]
            self._ref_counts[pages] -= 1
            self._tree.lock(_last(pages), self._last_read, -1)

    # ---- steps ---------------------------------------------------------------------------------------

    def batch_scheduled(self, step: Step, reqs: Sequence[Req], now: float) -> None:
        self._num_admitted += len(step.admissions)
        for admission in step.admissions:
            self._page_table[admission.req_pool_idx] = -1
            entry = self.open[admission.uid]
            entry.admitted_t = entry.admitted_t or now
        rows, columns, pages = step.page_table_updates
        self._page_table[rows, columns] = pages
        for i in range(step.num_continuing, step.rows):  # prefill chunks: the rest is known from the tokens
            self.open[reqs[i].uid].num_computed_tokens = int(step.num_computed_tokens[i] + step.num_scheduled_tokens[i])
        self.in_flight.append((step, list(reqs), now))
        self.next_step = step.id + 1

    def step_finished(self, result: StepResult, reqs: Sequence[Req | None], now: float) -> None:
        self.in_flight.popleft()
        self._last_read = result.id
        self._free_retired()
        if self._without_token:
            for req in reqs:
                if req is not None and req.uid in self._without_token:
                    self._without_token.remove(req.uid)
                    self.open[req.uid].first_t = now

    # ---- the state at one moment -----------------------------------------------------------------------

    def batches(self) -> list[ev.Batch]:
        """Return the events of the steps in flight."""
        return [batch_event(step, [req.uid for req in reqs], now, 0) for step, reqs, now in self.in_flight]

    def now(self, text: bool) -> dict[str, Any]:
        """Return the state as JSON can hold it, between two turns of the loop; with ``text``, with token ids.

        ``owner`` and ``refs`` are run-length encoded: [value, count]. A node of ``tree`` is [index of its parent or -1,
        pages, users, step of its last use]; a node comes before its children.
        """
        index: dict[int, int] = {}
        tree: list[list[Any]] = []
        for node in self._tree.nodes():
            index[id(node)] = len(tree)
            tree.append([index.get(id(node.parent), -1), node.pages, node.users, node.step])
        in_flight = self.batches()
        state: dict[str, Any] = {
            "event": "now",
            "step": self.next_step,
            "read": self._last_read,
            "added": self._num_added,
            "admitted": self._num_admitted,
            "requests": [self._request(entry) for entry in self.open.values()],
            "owner": _runs(self._owner),
            "refs": _runs(self._ref_counts),
            "tree": tree,
            "in_flight": in_flight,
            "retiring": [[step, pages.tolist()] for step, pages in self._retiring],
            "unlocks": list(self._unlocks),
            "mean_length": self._reserve.mean_length,
        }
        if text:
            newest = list(self.tokens.items())[-MAX_TEXT_PAGES:]
            state["tokens"] = [[page, ids.tolist()] for page, ids in newest]
            state["ids"] = {str(entry.req.uid): entry.req.tokens().tolist() for entry in self.open.values()}
        else:
            for batch in in_flight:
                hide(batch)
        return state

    def _request(self, entry: _Open) -> dict[str, Any]:
        req, row = entry.req, entry.req.req_pool_idx
        computed = entry.num_computed_tokens
        if row >= 0 and computed >= entry.num_prefill_tokens:
            computed = self._computed(req)
        table = self._page_table[row] if row >= 0 else self._page_table[:0].reshape(-1)
        return {
            "uid": req.uid,
            "arrival": req.arrival,
            "added": entry.added,
            "t": entry.t,
            "prompt": len(req.prompt_ids),
            "output": len(req.output_ids),
            "max": req.params.max_tokens,
            "priority": req.priority,
            "queued": req.queued_at_step,
            "row": row,
            "order": req.admission_order,
            "prefill": entry.num_prefill_tokens,
            "computed": computed if row >= 0 else 0,
            "cached": entry.cached_pages,
            "hit": entry.num_cached_tokens,
            "admitted": entry.admitted_t,
            "first": entry.first_t,
            "retractions": entry.retractions,
            "pages": table[table >= 0].tolist(),
        }

    def _computed(self, req: Req) -> int:
        """Return the positions of a decoding request that have KV, or will have after the steps in flight."""
        for step, reqs, _ in reversed(self.in_flight):
            i = next((i for i, each in enumerate(reqs) if each is req), None)
            if i is not None:
                count = 1 if i in step.verification_rows else int(step.num_scheduled_tokens[i])
                return int(step.num_computed_tokens[i]) + count
        return len(req) - 1


def hide(event: ev.Event) -> None:
    """Replace the token ids of an event by 0. Their number stays, so the events are still a trace."""
    if isinstance(event, ev.Add):
        event.prompt_ids = [0] * len(event.prompt_ids)
        event.cache_salt = None
    elif isinstance(event, ev.Batch):
        event.drafts = [[0] * len(draft) for draft in event.drafts]
    elif isinstance(event, ev.Done):
        event.tokens = [0] * len(event.tokens)
        if event.runs is not None:
            event.runs = [[0] * len(run) for run in event.runs]


def _last(pages: Sequence[int]) -> int | None:
    return pages[-1] if pages else None


def _runs(values: I32) -> list[list[int]]:
    """Return a run-length encoding: [value, count] for each run of equal values."""
    if not len(values):
        return []
    starts = np.flatnonzero(np.diff(values, prepend=values[0] - 1))
    lengths = np.diff(starts, append=len(values))
    return [[value, length] for value, length in zip(values[starts].tolist(), lengths.tolist(), strict=True)]
