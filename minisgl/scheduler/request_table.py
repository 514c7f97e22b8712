"""The running requests as arrays, one entry a slot, so that a step's cost hardly grows with its rows.

Knows positions and pages of what runs; requests themselves are the scheduler's. ``table`` is the host's copy of the
page table that the engine keeps on the device.
"""

from __future__ import annotations

import numpy as np

from minisgl.core import I32, EngineSpec, Req
from minisgl.scheduler.base import Running


class RequestTable:
    """Per slot, int32: ``computed`` positions a launched step has computed or the cache held; ``target`` prompt tokens
    (and output kept over a retraction); ``max_len`` tokens at the end; ``pages`` filled columns of ``table``;
    ``last`` the last step that had a row; ``seat`` which admission holds the slot, -1 for none."""

    def __init__(self, spec: EngineSpec):
        self.page_size = spec.page_size
        n = spec.max_running_requests
        (
            self.uid,
            self.num_computed_tokens,
            self.num_prefill_tokens,
            self.max_len,
            self.num_pages,
            self.last_step,
            self.admission_order,
        ) = (np.full(n, -1, np.int32) for _ in range(7))
        self.page_table: I32 = np.full((n, -(-spec.max_seq_len // spec.page_size)), -1, np.int32)
        self.reqs: list[Req] = []  # in order of admission
        self.req_pool_indices: I32 = np.empty(0, np.int32)  # their slots
        self._views: list[Running] = []
        self._seen: I32 = np.empty((3, 0), np.int32)

    def admit(self, req: Req, pages: I32, computed: int, step: int) -> None:
        """``req`` takes its slot: ``pages`` fill its table row, ``computed`` of its tokens are in the cache."""
        s = req.req_pool_idx
        self.uid[s] = req.uid
        self.num_computed_tokens[s], self.num_prefill_tokens[s], self.max_len[s] = computed, len(req), req.max_len
        self.num_pages[s], self.last_step[s], self.admission_order[s] = len(pages), step, req.admission_order
        self.page_table[s, : len(pages)] = pages
        self.reqs.append(req)
        self._reorder()

    def remove(self, req: Req) -> None:
        """``req`` has lost its slot."""
        self.admission_order[req.req_pool_idx] = -1
        self.reqs.remove(req)
        self._reorder()

    def pages_of(self, req: Req) -> I32:
        """The pages of a seated request, a copy."""
        row: I32 = self.page_table[req.req_pool_idx, : self.num_pages[req.req_pool_idx]].copy()
        return row

    def _reorder(self) -> None:
        self.req_pool_indices = np.fromiter((r.req_pool_idx for r in self.reqs), np.int32, len(self.reqs))
        self._views = []

    def decoding(self) -> I32:
        """Slots whose next step is a decode row. One whose last token is sampled, though unread, has none."""
        s = self.req_pool_indices
        done = self.num_computed_tokens[s]
        out: I32 = s[(done >= self.num_prefill_tokens[s]) & (done < self.max_len[s] - 1)]
        return out

    def needing_page(self, slots: I32) -> I32:
        """Those of ``slots`` whose next token begins a page."""
        out: I32 = slots[self.num_computed_tokens[slots] >= self.num_pages[slots] * self.page_size]
        return out

    def page_growth(self, ahead: int) -> int:
        """Pages that all running requests will need for their next ``ahead`` tokens."""
        s = self.req_pool_indices
        end = np.minimum(
            np.maximum(self.num_computed_tokens[s], self.num_prefill_tokens[s]) + ahead, self.max_len[s] - 1
        )
        return int(np.maximum(-(-end // self.page_size) - self.num_pages[s], 0).sum())

    def running_views(self, next_step: int) -> list[Running]:
        """What a policy sees of each running request that can take part in step ``next_step``."""
        s = self.req_pool_indices
        if not len(s):
            return []
        computed = self.num_computed_tokens[s]
        left = np.maximum(self.num_prefill_tokens[s] - computed, 0)
        new = (left == 0) & (computed >= self.num_pages[s] * self.page_size)
        seen = np.stack((left, new, next_step - 1 - self.last_step[s]))
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
