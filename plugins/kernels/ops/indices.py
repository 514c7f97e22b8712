"""Flattening of the page tables of a step's rows into CSR form, which FlashInfer's kernels expect.

Ye et al., FlashInfer, 2025 (a page table as a block-sparse matrix in CSR form). This module has the torch reference,
which a CPU runs; on a GPU the Triton kernel runs. The Triton version neither waits for the device nor allocates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def page_indices(
    page_table: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    page_size: int,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
) -> None:
    """Write the page numbers of a step's rows, one row after another, into ``indices``.

    page_table is [request-pool rows, columns]; req_pool_indices and seq_lens are [rows] int32; each sequence length is
    at least 1. The outputs are int32 tensors of the caller, at fixed addresses if a CUDA graph reads them: row r's
    pages are ``indices[indptr[r]:indptr[r + 1]]``, and its last page holds ``last_page_len[r]`` tokens. ``indptr`` is
    [rows + 1] and ``last_page_len`` is [rows]. ``indices`` must have room for the pages of all rows; its entries past
    the last page are unspecified.
    """
    if page_table.is_cuda:
        from minisgl.plugins.kernels.ops.triton import indices as triton

        triton.page_indices(page_table, req_pool_indices, seq_lens, page_size, indptr, indices, last_page_len)
    else:
        page_indices_torch(page_table, req_pool_indices, seq_lens, page_size, indptr, indices, last_page_len)


def page_indices_torch(
    page_table: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    page_size: int,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
) -> None:
    """Compute `page_indices` in plain torch: the torch reference."""
    pages = torch.div(seq_lens + (page_size - 1), page_size, rounding_mode="floor")
    indptr[0] = 0
    torch.cumsum(pages, 0, dtype=torch.int32, out=indptr[1:])
    torch.sub(seq_lens, (pages - 1) * page_size, out=last_page_len)
    at = torch.arange(len(indices), dtype=torch.int32, device=page_table.device)
    row = torch.searchsorted(indptr[1:], at, right=True).clamp_(max=len(req_pool_indices) - 1)
    column = (at - indptr.index_select(0, row)).clamp_(max=page_table.shape[1] - 1)
    indices.copy_(page_table[req_pool_indices.index_select(0, row).long(), column.long()])
