"""The running requests as arrays, with one entry per request-pool row, so that a step costs little more for more rows.

This module knows positions and pages of the running requests. ``page_table`` is the host copy of the page table that
the engine keeps on the device.
"""

from __future__ import annotations

import numpy as np

from minisgl.core import I32, EngineSpec, Req
from minisgl.scheduler.base import Running


class RequestTable:
    """One array per attribute of a running request, each int32 ``[max_running_requests]``, indexed by req_pool_idx.

    - ``uid``: the request in this row.
    - ``num_computed_tokens``: positions that the cache held or that a launched step has computed.
    - ``num_prefill_tokens``: tokens to prefill: the prompt, and the output kept over a retraction.
    - ``max_len``: tokens of the request when it reaches its ``max_tokens``.
    - ``num_pages``: number of filled columns in this row of ``page_table``.
    - ``last_step``: the last step in which the request had a row.
    - ``admission_order``: number of the admission that occupies the row; -1 if the row is not occupied.

    ``page_table`` is int32 ``[max_running_requests, pages of max_seq_len]``.
    """

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
        self.reqs: list[Req] = []  # running requests, in order of admission
        self.req_pool_indices: I32 = np.empty(0, np.int32)  # [len(reqs)] the row of each
        self._views: list[Running] = []  # views of the last step; unchanged ones are reused
        self._view_fields: I32 = np.empty((3, 0), np.int32)  # the fields of _views that change

    def admit(self, req: Req, pages: I32, num_computed_tokens: int, step: int) -> None:
        """Fill the row of an admitted request.

        ``pages`` are the pages of all its tokens so far, of which the cache holds the first ``num_computed_tokens``.
        ``step`` is stored as the last step in which the request had a row.
        """
        row = req.req_pool_idx
        self.uid[row] = req.uid
        self.num_computed_tokens[row], self.num_prefill_tokens[row] = num_computed_tokens, len(req)
        self.max_len[row] = req.max_len
        self.num_pages[row], self.last_step[row], self.admission_order[row] = len(pages), step, req.admission_order
        self.page_table[row, : len(pages)] = pages
        self.reqs.append(req)
        self._update_req_pool_indices()

    def remove(self, req: Req) -> None:
        """Clear the row of a request that was retracted or has ended."""
        self.admission_order[req.req_pool_idx] = -1
        self.reqs.remove(req)
        self._update_req_pool_indices()

    def pages_of(self, req: Req) -> I32:
        """Return a copy of the page-table row of a running request: int32 ``[pages]``."""
        pages: I32 = self.page_table[req.req_pool_idx, : self.num_pages[req.req_pool_idx]].copy()
        return pages

    def _update_req_pool_indices(self) -> None:
        self.req_pool_indices = np.fromiter((r.req_pool_idx for r in self.reqs), np.int32, len(self.reqs))
        self._views = []

    def decoding(self) -> I32:
        """Return the rows of the requests that can decode in the next step.

        A request whose last token is already being sampled by an unread step is left out.
        """
        rows = self.req_pool_indices
        computed = self.num_computed_tokens[rows]
        out: I32 = rows[(computed >= self.num_prefill_tokens[rows]) & (computed < self.max_len[rows] - 1)]
        return out

    def needing_page(self, req_pool_indices: I32) -> I32:
        """Return the rows of ``req_pool_indices`` whose next token starts a page that is not allocated yet."""
        rows = req_pool_indices
        out: I32 = rows[self.num_computed_tokens[rows] >= self.num_pages[rows] * self.page_size]
        return out

    def page_growth(self, num_tokens: int) -> int:
        """Return how many new pages all running requests together need for ``num_tokens`` output tokens more each."""
        rows = self.req_pool_indices
        end = np.minimum(
            np.maximum(self.num_computed_tokens[rows], self.num_prefill_tokens[rows]) + num_tokens,
            self.max_len[rows] - 1,
        )
        return int(np.maximum(-(-end // self.page_size) - self.num_pages[rows], 0).sum())

    def running_views(self, next_step: int) -> list[Running]:
        """Return the policy's view of each running request that can take part in step ``next_step``."""
        rows = self.req_pool_indices
        if not len(rows):
            return []
        computed = self.num_computed_tokens[rows]
        remaining = np.maximum(self.num_prefill_tokens[rows] - computed, 0)
        new_pages = (remaining == 0) & (computed >= self.num_pages[rows] * self.page_size)
        view_fields = np.stack((remaining, new_pages, next_step - 1 - self.last_step[rows]))
        if self._views:  # most views are the same as in the step before: replace only those that changed
            stale = np.flatnonzero((view_fields != self._view_fields).any(axis=0))
        else:
            stale, self._views = np.arange(len(rows)), [_PLACEHOLDER] * len(rows)
        for i, num_remaining, num_new_pages, skipped in zip(
            stale.tolist(), *view_fields[:, stale].tolist(), strict=True
        ):
            req = self.reqs[i]
            self._views[i] = Running(req.uid, num_remaining, num_new_pages, skipped, req.admission_order)
        self._view_fields = view_fields
        # A request whose last token is already being sampled has nothing left to compute.
        complete = (remaining == 0) & (computed >= self.max_len[rows] - 1)
        if complete.any():
            return [view for view, is_complete in zip(self._views, complete.tolist(), strict=True) if not is_complete]
        return self._views


_PLACEHOLDER = Running(-1, 0, 0, 0, -1)
