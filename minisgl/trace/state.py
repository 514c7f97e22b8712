"""What a scheduler's world looks like after each event of its trace: requests, slots, pages, the tree, unread steps.

Follows events and judges none: a run that broke a promise can be followed too, as far as its events make sense.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from minisgl.core import I32, EngineSpec
from minisgl.trace import events as ev
from minisgl.trace.tree import PageTree

__all__ = ["CACHE", "FREE", "RETIRING", "Launch", "Request", "State"]

FREE, RETIRING, CACHE = -1, -2, -3
"""Owners of a page that are no request."""


@dataclass
class Request:
    """One request. ``tokens`` is prompt and output; ``computed`` positions that launched steps compute in this seat;
    ``shared`` the pages of the prefix that is locked for it."""

    uid: int
    number: int  # by arrival
    added: ev.Add
    tokens: list[int]
    queued: int  # the step for which it began to wait
    max_len: int
    slot: int = -1
    seat: int = -1  # number of its admission
    target: int = 0  # tokens that it had when it took its seat
    computed: int = 0
    last_step: int = -1  # that had a row of it
    shared: list[int] = field(default_factory=list)
    reason: str = ""

    @property
    def state(self) -> str:
        """``waiting``, ``prefill``, ``decode`` or how it ended."""
        if self.reason:
            return self.reason
        return "waiting" if self.slot < 0 else "prefill" if self.computed < self.target else "decode"

    @property
    def output(self) -> int:
        """Tokens that it gained."""
        return len(self.tokens) - len(self.added.prompt_ids)


@dataclass
class Launch:
    """An unread step: per row, who sat there and which pages its table named."""

    batch: ev.Batch
    seats: list[int]
    pages: list[I32]


class State:
    """Starts empty; `apply` each event in order."""

    def __init__(self, spec: EngineSpec):
        self.spec = spec
        self.requests: dict[int, Request] = {}
        self.open: dict[int, Request] = {}  # by arrival
        self.running: dict[int, Request] = {}  # by admission
        self.owner: I32 = np.full(spec.num_pages, FREE, np.int32)
        self.users: I32 = np.zeros(spec.num_pages, np.int32)
        self.table: I32 = np.full((spec.max_running_requests, -(-spec.max_seq_len // spec.page_size)), -1, np.int32)
        self.tree = PageTree()
        self.source: dict[int, tuple[int, int]] = {}  # cached page -> whose page it was, and which of its pages
        self.unread: deque[Launch] = deque()
        self.retiring: deque[tuple[int, list[int]]] = deque()
        self.launched = self.read = -1
        self.failed = False  # the engine is gone: nothing is given back any more
        self._unlocks: deque[tuple[int, list[int]]] = deque()
        self._admissions = 0

    @property
    def idle(self) -> bool:
        return not self.open and not self.unread

    @property
    def next_step(self) -> int:
        return self.launched + 1

    def count(self, owner: int) -> int:
        """Pages of that owner."""
        return int((self.owner == owner).sum())

    @property
    def evictable(self) -> int:
        """The cache's pages that nobody uses."""
        return int(((self.owner == CACHE) & (self.users == 0)).sum())

    def waiting(self) -> list[Request]:
        """Requests without a slot, by arrival."""
        return [req for req in self.open.values() if req.slot < 0]

    def tokens(self, pages: Sequence[int]) -> list[int]:
        """The token ids whose KV these pages of the cache hold."""
        size, out = self.spec.page_size, list[int]()
        for page in pages:
            uid, i = self.source[page]
            out += self.requests[uid].tokens[i * size : (i + 1) * size]
        return out

    def apply(self, event: ev.Line) -> None:
        """Let it happen."""
        match event:
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
            case ev.Batch():
                self._batch(event)
            case ev.Cache():
                self._cache(event)
            case ev.Free():
                self.owner[event.pages] = RETIRING
                self.retiring.append((event.step, event.pages))
                self._done(self.read)
            case ev.Done():
                self._step(event)
            case ev.Retract() | ev.Finish():
                self._leave(event)

    # ---- requests ------------------------------------------------------------------------------------

    def _add(self, event: ev.Add) -> None:
        longest = len(event.prompt_ids) + event.max_tokens
        req = Request(event.uid, len(self.requests), event, list(event.prompt_ids), event.step, longest)
        self.requests[event.uid] = self.open[event.uid] = req

    def _match(self, event: ev.Match) -> None:
        req = self.requests[event.uid]
        req.shared = list(event.pages)
        req.target, req.computed = event.tokens, len(event.pages) * self.spec.page_size
        self.users[event.pages] += 1
        self.tree.lock(_last(event.pages), event.step)

    def _admit(self, event: ev.Admit) -> None:
        req = self.requests[event.uid]
        req.slot, req.seat, req.last_step = event.req_pool_idx, self._admissions, event.step - 1
        self._admissions += 1
        self.running[req.uid] = req
        self.table[event.req_pool_idx] = -1

    def _leave(self, event: ev.Retract | ev.Finish) -> None:
        req = self.requests[event.uid]
        if isinstance(event, ev.Finish):
            req.reason = event.finish_reason
            self.open.pop(req.uid, None)
            self.failed = self.failed or event.finish_reason == "error"
        else:
            req.queued = event.step
        if req.slot >= 0 and not self.failed:
            self._unlocks.append((self.launched, req.shared))
            self._done(self.read)
        self.running.pop(req.uid, None)
        req.slot = req.seat = -1
        req.shared = []

    # ---- steps ---------------------------------------------------------------------------------------

    def _batch(self, event: ev.Batch) -> None:
        slots, columns, pages = event.page_table_updates
        for slot, column, page in zip(slots, columns, pages, strict=True):  # in order: the last one counts
            self.table[slot, column] = page
        size = self.spec.page_size
        rows = list(
            zip(event.uids, event.req_pool_indices, event.num_computed_tokens, event.num_scheduled_tokens, strict=True)
        )
        named = [self.table[slot, : -(-(start + count) // size)].copy() for _, slot, start, count in rows]
        seats = [self.requests[uid].seat for uid in event.uids]
        self.unread.append(Launch(event, seats, named))
        self.launched = event.step
        for uid, _, start, count in rows:
            req = self.requests[uid]
            req.computed, req.last_step = start + count, event.step

    def _step(self, event: ev.Done) -> None:
        launch = self.unread.popleft()
        self._done(event.step)
        gained = event.gained or [1] * len(event.tokens)
        for uid, token, got in zip(launch.batch.uids, event.tokens, gained, strict=True):
            if got:
                self.requests[uid].tokens.append(token)

    def _done(self, step: int) -> None:
        """The result of ``step`` was read: what waited for it is free."""
        self.read = step
        while self.retiring and self.retiring[0][0] <= step:
            pages = self.retiring.popleft()[1]
            self.owner[pages] = FREE
        while self._unlocks and self._unlocks[0][0] <= step:
            pages = self._unlocks.popleft()[1]
            self.users[pages] -= 1
            self.tree.lock(_last(pages), step, -1)

    # ---- the cache -----------------------------------------------------------------------------------

    def _cache(self, event: ev.Cache) -> None:
        req, fresh = self.requests[event.uid], set(event.pages)
        self.owner[event.pages] = CACHE
        self.source |= {page: (req.uid, i) for i, page in enumerate(event.cached_pages, event.start) if page in fresh}
        before = _last(req.shared)
        run: list[int] = []
        below = before
        for page in event.cached_pages:  # new pages in one piece, below the last one that it had
            if page in fresh:
                run.append(page)
                continue
            if run:
                self.tree.insert(below, run, event.step)
            run, below = [], page
        if run:
            self.tree.insert(below, run, event.step)
        self.users[event.cached_pages] += 1
        req.shared = req.shared + event.cached_pages
        self.tree.lock(_last(req.shared), event.step)
        self.tree.lock(before, event.step, -1)


def _last(pages: Sequence[int]) -> int | None:
    return pages[-1] if pages else None
