"""Gathered page-table rows, for attention kernels that take a page table with one row for each row of the batch.

Attention backends call `PageTableRows.gather` in their ``plan``, once per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from minisgl.attention import AttnBatch, GraphKey

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PageTableRows"]


class PageTableRows:
    """Gathers ``page_table[req_pool_indices]`` of a batch, with as many columns as its longest row has pages.

    For a batch of a graph bucket, the result has all columns of the page table, in a static buffer that all buckets in
    ``keys`` share.
    """

    def __init__(self, page_size: int, keys: Sequence[GraphKey]):
        self.page_size = page_size
        self._max_rows = max((key.rows for key in keys), default=0)
        self._static: Tensor | None = None

    def gather(self, batch: AttnBatch, first: int, last: int) -> Tensor:
        """Return the page numbers of rows ``first`` to ``last`` (exclusive), int32 [last - first, columns].

        The gather runs on the current stream. If ``batch.graph_key`` is set, the result always has the same memory and
        all columns of the page table. Columns past the pages of the longest row are then stale, so a kernel must read
        only the pages within ``seq_lens``.
        """
        width = -(-int(batch.seq_lens_cpu[first:last].max()) // self.page_size)
        req_pool_indices, page_table = batch.req_pool_indices[first:last], batch.page_table[:, :width]
        if batch.graph_key is None:
            return page_table.index_select(0, req_pool_indices)
        if self._static is None:  # all buckets can share this buffer, because each step plans before it replays
            self._static = batch.page_table.new_zeros((self._max_rows, batch.page_table.shape[1]))
        static = self._static[: last - first]
        static[:, :width] = page_table.index_select(0, req_pool_indices)
        return static

    def max_seq_len(self, batch: AttnBatch, first: int, last: int) -> int:
        """Return an upper bound for the sequence lengths of rows ``first`` to ``last`` (exclusive), in tokens.

        For an eager step it is the longest of these rows. For a graph bucket it is the capacity of the page table,
        because the bound is recorded and must hold for every step that replays the bucket.
        """
        if batch.graph_key is not None:
            return batch.page_table.shape[1] * self.page_size
        return int(batch.seq_lens_cpu[first:last].max())
