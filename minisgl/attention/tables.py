"""The page-table rows of a step's rows, gathered for kernels that take one row of page numbers for each sequence.

Knows the live table and the graph buckets; a backend asks for it in its ``plan``, once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from minisgl.attention import AttnBatch, GraphKey

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["RowTables"]


class RowTables:
    """Gathers ``table[slots]``, as wide as the longest row needs; for a bucket into memory that graphs were made on."""

    def __init__(self, page_size: int, keys: Sequence[GraphKey]):
        self.page_size = page_size
        self._most_rows = max((key.rows for key in keys), default=0)
        self._static: Tensor | None = None

    def gather(self, batch: AttnBatch, first: int, last: int) -> Tensor:
        """[last - first, columns] int32: pool pages of rows ``first`` to ``last``, on the current stream.

        With ``batch.key`` set, always the same memory and all columns: pages beyond the longest row are left over from
        earlier steps, so a kernel must stop at ``seq_lens``.
        """
        width = -(-int(batch.seq_lens_cpu[first:last].max()) // self.page_size)
        slots, live = batch.req_pool_indices[first:last], batch.page_table[:, :width]
        if batch.graph_key is None:
            return live.index_select(0, slots)
        if self._static is None:  # buckets share it: each step plans before it replays
            self._static = batch.page_table.new_zeros((self._most_rows, batch.page_table.shape[1]))
        static = self._static[: last - first]
        static[:, :width] = live.index_select(0, slots)
        return static

    def longest(self, batch: AttnBatch, first: int, last: int) -> int:
        """Tokens that no row is longer than: of this step, or for a bucket of any step that will replay it."""
        if batch.graph_key is not None:
            return batch.page_table.shape[1] * self.page_size
        return int(batch.seq_lens_cpu[first:last].max())
