"""The running requests of `cache=groups` as arrays: which columns of each group's page table hold a page."""

from __future__ import annotations

import numpy as np

from minisgl.core import I32, EngineSpec, Req
from minisgl.scheduler.request_table import RequestTable


class GroupTable(RequestTable):
    """A `RequestTable` with further arrays, indexed by request-pool row and group.

    - ``tables`` int32 ``[rows, groups, columns]``: the page table, whose memory it shares.
    - ``firsts``, ``ends`` int32 ``[rows, groups]``: the columns that hold pages are those from ``firsts`` to ``ends``,
      without the last. ``firsts`` is 0 in a group without a window.
    - ``is_cached`` bool ``[rows, groups, columns]``: whether the page of such a column belongs to the prefix cache.
    - ``num_promised_pages`` int32 ``[rows]``: free or evictable pages that are kept for the rest of the prompt.
    - ``spares``: pages of the request that are in no column: those that were behind its window.
    """

    def __init__(self, spec: EngineSpec):
        super().__init__(spec)
        rows, groups = spec.max_running_requests, len(spec.groups)
        self.tables = self.page_table.reshape(rows, groups, spec.num_columns)
        self.firsts: I32 = np.zeros((rows, groups), np.int32)
        self.ends: I32 = np.zeros((rows, groups), np.int32)
        self.is_cached = np.zeros((rows, groups, spec.num_columns), bool)
        self.num_promised_pages: I32 = np.zeros(rows, np.int32)
        self.spares: list[list[list[int]]] = [[[] for _ in spec.groups] for _ in range(rows)]
        self.num_spares: I32 = np.zeros((rows, groups), np.int32)
        self.windows: I32 = np.array([group.window for group in spec.groups], np.int32)
        # The most pages that a request which decodes has in a group.
        spans = [2**30 if group.window < 0 else -(-group.window // spec.page_size) + 1 for group in spec.groups]
        self.spans: I32 = np.array(spans, np.int32)

    def clear(self, rows: I32) -> None:
        """Forget the pages of these rows."""
        self.firsts[rows] = self.ends[rows] = self.num_spares[rows] = self.num_promised_pages[rows] = 0
        self.is_cached[rows] = False
        for row in rows.tolist():
            self.spares[row] = [[] for _ in self.windows]

    def new_pages(self, req_pool_indices: I32) -> I32:
        """Return how many new pages the next token of each row needs, beside its spares: int32 ``[rows]``."""
        rows = req_pool_indices
        columns = self.num_computed_tokens[rows] // self.page_size
        missing = (columns[:, None] >= self.ends[rows]) & (self.num_spares[rows] == 0)
        out: I32 = missing.sum(axis=1, dtype=np.int32)
        return out

    def growth(self, pages_now: I32, pages_then: I32) -> I32:
        """Return how many pages more the longer requests need: all arrays are int32 ``[requests]``, pages of tokens."""
        before, after = (np.minimum(pages[:, None], self.spans) for pages in (pages_now, pages_then))
        grown: I32 = (after - before).sum(axis=1, dtype=np.int32)
        return grown

    def page_growth(self, num_tokens: int) -> I32:
        """Return how many new pages the request in each row needs for ``num_tokens`` output tokens more."""
        rows = self.req_pool_indices
        now = np.maximum(self.num_computed_tokens[rows], self.num_prefill_tokens[rows])
        end = np.maximum(np.minimum(now + num_tokens, self.max_len[rows] - 1), now)
        growth: I32 = np.zeros(len(self.uid), np.int32)
        growth[rows] = self.growth(-(-now // self.page_size), -(-end // self.page_size))
        return growth

    def cached_pages_of(self, row: int) -> list[int]:
        """Return the pages of the prefix cache that the request has in its columns, in the order of the columns."""
        columns, groups = np.nonzero(self.is_cached[row].T)
        pages: list[int] = self.tables[row, groups, columns].tolist()
        return pages

    def own_pages_of(self, row: int) -> list[int]:
        """Return the pages that belong to the request itself, its spares included."""
        pages = []
        for group, (first, end) in enumerate(zip(self.firsts[row].tolist(), self.ends[row].tolist(), strict=True)):
            columns = first + np.flatnonzero(~self.is_cached[row, group, first:end])
            pages += [*self.tables[row, group, columns].tolist(), *self.spares[row][group]]
        return pages

    def pages_of(self, req: Req) -> I32:
        """Return the request's pages of all groups: first those of the prefix cache, then its own."""
        row = req.req_pool_idx
        return np.array([*self.cached_pages_of(row), *self.own_pages_of(row)], np.int32)
