"""The running requests as arrays, with one entry per request-pool row, so that a step costs little more for more rows.

This module knows positions and pages of the running requests. ``page_table`` is the host copy of the page table that
the engine keeps on the device. `Reserve` estimates how many tokens a running request will still write.
"""

from __future__ import annotations

from collections.abc import Sequence

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

    ``page_table`` is int32 ``[max_running_requests, columns of all groups]``.
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
        self.page_table: I32 = np.full((n, len(spec.groups) * spec.num_columns), -1, np.int32)
        self._running: dict[int, Req] = {}  # running requests by admission order, in this order
        self._reqs: list[Req] | None = []  # its values; None after a change
        self.req_pool_indices: I32 = np.empty(0, np.int32)  # the row of each running request, in the same order
        self._views: list[Running] = []  # views of the last step; unchanged ones are reused
        self._view_fields: I32 = np.empty((3, 0), np.int32)  # the fields of _views that change

    @property
    def reqs(self) -> list[Req]:
        """The running requests, in order of admission. Do not change the list."""
        if self._reqs is None:
            self._reqs = list(self._running.values())
        return self._reqs

    def admit(
        self, reqs: Sequence[Req], pages: I32, num_pages: I32, num_computed_tokens: I32, step: int
    ) -> tuple[I32, I32, I32]:
        """Fill the rows of admitted requests. Return the changes of the page table: (rows, columns, pages).

        ``num_pages[i]`` of ``pages`` hold all tokens so far of request i; the requests' pages follow each other. The
        cache holds the first ``num_computed_tokens[i]`` tokens. ``step`` is stored as the last step in which the
        requests had a row.
        """
        rows = np.array([req.req_pool_idx for req in reqs], np.int32)
        self.uid[rows] = [req.uid for req in reqs]
        self.num_computed_tokens[rows] = num_computed_tokens
        self.num_prefill_tokens[rows] = [len(req) for req in reqs]
        self.max_len[rows] = [req.max_len for req in reqs]
        self.num_pages[rows], self.last_step[rows] = num_pages, step
        self.admission_order[rows] = [req.admission_order for req in reqs]
        firsts = np.cumsum(num_pages) - num_pages
        columns = np.arange(len(pages), dtype=np.int32) - np.repeat(firsts, num_pages).astype(np.int32)
        table_rows = np.repeat(rows, num_pages)
        self.page_table[table_rows, columns] = pages
        self._running.update((req.admission_order, req) for req in reqs)
        self.req_pool_indices = np.concatenate((self.req_pool_indices, rows))
        self._reqs, self._views = None, []
        return table_rows, columns, pages

    def remove(self, reqs: Sequence[Req]) -> None:
        """Clear the rows of requests that were retracted or have ended."""
        self.admission_order[[req.req_pool_idx for req in reqs]] = -1
        for req in reqs:
            del self._running[req.admission_order]
        self.req_pool_indices = self.req_pool_indices[self.admission_order[self.req_pool_indices] >= 0]
        self._reqs, self._views = None, []

    def pages_of(self, req: Req) -> I32:
        """Return a copy of the page-table row of a running request: int32 ``[pages]``."""
        pages: I32 = self.page_table[req.req_pool_idx, : self.num_pages[req.req_pool_idx]].copy()
        return pages

    def decoding(self) -> I32:
        """Return the rows of the requests that can decode in the next step.

        A request whose last token is already being sampled by an unread step is left out.
        """
        rows = self.req_pool_indices
        computed = self.num_computed_tokens[rows]
        out: I32 = rows[(computed >= self.num_prefill_tokens[rows]) & (computed < self.max_len[rows] - 1)]
        return out

    def new_pages(self, req_pool_indices: I32) -> I32:
        """Return how many new pages the next token of each row needs: int32 ``[rows]``."""
        rows = req_pool_indices
        out: I32 = (self.num_computed_tokens[rows] >= self.num_pages[rows] * self.page_size).astype(np.int32)
        return out

    def page_growth(self, num_tokens: int) -> I32:
        """Return how many new pages the request in each row needs for ``num_tokens`` output tokens more.

        The result is int32 ``[max_running_requests]``, 0 in rows without a request.
        """
        rows = self.req_pool_indices
        end = np.minimum(
            np.maximum(self.num_computed_tokens[rows], self.num_prefill_tokens[rows]) + num_tokens,
            self.max_len[rows] - 1,
        )
        growth: I32 = np.zeros(len(self.uid), np.int32)
        growth[rows] = np.maximum(-(-end // self.page_size) - self.num_pages[rows], 0)
        return growth

    def running_views(self, next_step: int) -> list[Running]:
        """Return the policy's view of each running request that can take part in step ``next_step``."""
        views = self.all_views(next_step)
        # A request whose last token is already being sampled has nothing left to compute.
        rows = self.req_pool_indices
        computed = self.num_computed_tokens[rows]
        is_complete = (computed >= self.num_prefill_tokens[rows]) & (computed >= self.max_len[rows] - 1)
        if is_complete.any():
            return [view for view, complete in zip(views, is_complete.tolist(), strict=True) if not complete]
        return views

    def all_views(self, next_step: int) -> list[Running]:
        """Return the policy's view of each running request. Do not change the list."""
        rows, reqs = self.req_pool_indices, self.reqs
        if not reqs:
            return []
        computed = self.num_computed_tokens[rows]
        remaining = np.maximum(self.num_prefill_tokens[rows] - computed, 0)
        new_pages = (remaining == 0) * self.new_pages(rows)
        view_fields = np.array((remaining, new_pages, next_step - 1 - self.last_step[rows]))
        if self._views:  # most views are the same as in the step before: replace only those that changed
            stale = np.flatnonzero((view_fields != self._view_fields).any(axis=0))
        else:
            stale, self._views = np.arange(len(rows)), [_PLACEHOLDER] * len(rows)
        for i, num_remaining, num_new_pages, skipped in zip(
            stale.tolist(), *view_fields[:, stale].tolist(), strict=True
        ):
            req = reqs[i]
            self._views[i] = Running(
                req.uid, num_remaining, num_new_pages, skipped, req.admission_order, req.priority, req.arrival
            )
        self._view_fields = view_fields
        return self._views


_PLACEHOLDER = Running(-1, 0, 0, 0, -1)


# ---- how long requests will grow -----------------------------------------------------------------------

FIRST_LENGTH = 128.0
"""Length of an answer in tokens that is assumed before any answer has ended."""

SHARE = 1 / 4
"""Share of the mean length of an answer that is reserved for each running request.

An answer has half of its length left on average. But answers end at different times, and each that ends leaves its
pages to the others, so less is needed in reserve.
"""

WINDOW = 32
"""Number of answers over which the mean length is taken, with exponentially decreasing weights."""


class Reserve:
    """The number of tokens for which admission keeps pages free, for each running request.

    A reserve that is too small causes retractions; a reserve that is too large makes batches small. It depends only on
    the answers that ended and on the retractions, so it is the same in every run of the same steps. SGLang estimates
    with its ``new_token_ratio``, which falls with every step and rises after a retraction.
    """

    def __init__(self, max_seq_len: int) -> None:
        self.mean_length = FIRST_LENGTH
        self._max_length = max(max_seq_len / SHARE, FIRST_LENGTH)  # from here on, a request has its largest reserve

    @property
    def num_tokens(self) -> int:
        """Number of tokens to reserve for each running request."""
        return max(round(self.mean_length * SHARE), 1)

    def answer_ended(self, length: int) -> None:
        """Count an answer of ``length`` tokens that was complete."""
        self.mean_length += (length - self.mean_length) / WINDOW

    def pages_ran_out(self) -> None:
        """Raise the estimate, because a request is retracted for lack of pages: the reserve was too small."""
        self.mean_length = min(self.mean_length * (1 + 1 / WINDOW), self._max_length)
