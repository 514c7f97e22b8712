"""The running requests as arrays, one entry a slot, so that a step's cost hardly grows with its rows.

Knows positions and pages of what runs; requests themselves are the scheduler's. ``table`` is the host's copy of the
page table that the engine keeps on the device.
"""

from __future__ import annotations

import numpy as np

from minisgl.core import I32, EngineSpec, Req
from minisgl.scheduler.base import Running


class Slots:
    """Per slot, int32: ``computed`` positions a launched step has computed or the cache held; ``target`` prompt tokens
    (and output kept over a retraction); ``max_len`` tokens at the end; ``pages`` filled columns of ``table``;
    ``last`` the last step that had a row; ``seat`` which admission holds the slot, -1 for none."""

    def __init__(self, spec: EngineSpec):
        self.page_size = spec.page_size
        n = spec.max_slots
        self.uid, self.computed, self.target, self.max_len, self.pages, self.last, self.seat = (
            np.full(n, -1, np.int32) for _ in range(7)
        )
        self.table: I32 = np.full((n, -(-spec.max_len // spec.page_size)), -1, np.int32)
        self.reqs: list[Req] = []  # in order of admission
        self.order: I32 = np.empty(0, np.int32)  # their slots
        self._views: list[Running] = []
        self._seen: I32 = np.empty((3, 0), np.int32)

    def seat_req(self, req: Req, pages: I32, computed: int, step: int) -> None:
        """``req`` takes its slot: ``pages`` fill its table row, ``computed`` of its tokens are in the cache."""
        s = req.slot
        self.uid[s] = req.uid
        self.computed[s], self.target[s], self.max_len[s] = computed, len(req), req.max_len
        self.pages[s], self.last[s], self.seat[s] = len(pages), step, req.seated
        self.table[s, : len(pages)] = pages
        self.reqs.append(req)
        self._reorder()

    def clear(self, req: Req) -> None:
        """``req`` has lost its slot."""
        self.seat[req.slot] = -1
        self.reqs.remove(req)
        self._reorder()

    def row(self, req: Req) -> I32:
        """The pages of a seated request, a copy."""
        row: I32 = self.table[req.slot, : self.pages[req.slot]].copy()
        return row

    def _reorder(self) -> None:
        self.order = np.fromiter((r.slot for r in self.reqs), np.int32, len(self.reqs))
        self._views = []

    def decoding(self) -> I32:
        """Slots whose next step is a decode row. One whose last token is sampled, though unread, has none."""
        s = self.order
        done = self.computed[s]
        out: I32 = s[(done >= self.target[s]) & (done < self.max_len[s] - 1)]
        return out

    def need_page(self, slots: I32) -> I32:
        """Those of ``slots`` whose next token begins a page."""
        out: I32 = slots[self.computed[slots] >= self.pages[slots] * self.page_size]
        return out

    def growth(self, ahead: int) -> int:
        """Pages that all running requests will need for their next ``ahead`` tokens."""
        s = self.order
        end = np.minimum(np.maximum(self.computed[s], self.target[s]) + ahead, self.max_len[s] - 1)
        return int(np.maximum(-(-end // self.page_size) - self.pages[s], 0).sum())

    def views(self, next_step: int) -> list[Running]:
        """What a policy sees of each running request that can take part in step ``next_step``."""
        s = self.order
        if not len(s):
            return []
        computed = self.computed[s]
        left = np.maximum(self.target[s] - computed, 0)
        new = (left == 0) & (computed >= self.pages[s] * self.page_size)
        seen = np.stack((left, new, next_step - 1 - self.last[s]))
        if self._views:  # most rows look as they did: renew the others
            stale = np.flatnonzero((seen != self._seen).any(axis=0))
        else:
            stale, self._views = np.arange(len(s)), [_NOBODY] * len(s)
        for i, of_prompt, pages, skipped in zip(stale.tolist(), *seen[:, stale].tolist(), strict=True):
            req = self.reqs[i]
            self._views[i] = Running(req.uid, of_prompt, pages, skipped, req.seated)
        self._seen = seen
        over = (left == 0) & (computed >= self.max_len[s] - 1)
        if over.any():
            return [v for v, gone in zip(self._views, over.tolist(), strict=True) if not gone]
        return self._views


_NOBODY = Running(-1, 0, 0, 0, -1)
