"""Flattens the page tables of a step's rows, on the device: the form in which FlashInfer's kernels read them.

Ye et al., FlashInfer, 2025 (a page table as a block-sparse matrix in CSR form). Here is the plain torch version, which
is also what a CPU runs; neither waits for the device nor allocates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def page_indices(
    table: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    page_size: int,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
) -> None:
    """Write where each row's pages are.

    table [slots, columns], slots [rows], seq_lens [rows] int32, at least 1. Row r's pages are
    ``indices[indptr[r]:indptr[r + 1]]``, and its last one holds ``last_page_len[r]`` tokens. ``indptr`` [rows + 1],
    ``last_page_len`` [rows] and ``indices`` (of enough room for all rows: what lies behind the last page is left as it
    was, or overwritten) are int32, and static where a graph reads them.
    """
    if table.is_cuda:
        from minisgl.kernel.triton import indices as triton

        triton.page_indices(table, slots, seq_lens, page_size, indptr, indices, last_page_len)
    else:
        page_indices_torch(table, slots, seq_lens, page_size, indptr, indices, last_page_len)


def page_indices_torch(
    table: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    page_size: int,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
) -> None:
    """`page_indices` in plain torch."""
    pages = torch.div(seq_lens + (page_size - 1), page_size, rounding_mode="floor")
    indptr[0] = 0
    torch.cumsum(pages, 0, dtype=torch.int32, out=indptr[1:])
    torch.sub(seq_lens, (pages - 1) * page_size, out=last_page_len)
    at = torch.arange(len(indices), dtype=torch.int32, device=table.device)
    row = torch.searchsorted(indptr[1:], at, right=True).clamp_(max=len(slots) - 1)
    column = (at - indptr.index_select(0, row)).clamp_(max=table.shape[1] - 1)
    indices.copy_(table[slots.index_select(0, row).long(), column.long()])
