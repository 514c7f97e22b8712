"""The flat page indices of a step's rows in one Triton launch.

`minisgl.plugins.kernels.ops.indices` has the torch reference and describes arguments and results.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(
    do_not_specialize=["rows", "stride_table"],
    do_not_specialize_on_alignment=["req_pool_indices", "seq_lens", "indptr", "indices", "last_page_len"],
)
def page_indices_kernel(
    page_table, req_pool_indices, seq_lens, indptr, indices, last_page_len, rows, stride_table,
    PAGE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one row's page numbers. One program per row.

    Each program adds up the page counts of all earlier rows, which is cheaper than a second launch for a prefix sum.
    """
    row = tl.program_id(0)
    other = tl.arange(0, ROWS)
    pages_of = tl.cdiv(tl.load(seq_lens + other, mask=other < rows, other=0), PAGE)
    begin = tl.sum(tl.where(other < row, pages_of, 0), 0)
    length = tl.load(seq_lens + row)
    pages = tl.cdiv(length, PAGE)
    row_table = page_table + tl.load(req_pool_indices + row).to(tl.int64) * stride_table
    for start in range(0, pages, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(indices + begin + i, tl.load(row_table + i, mask=i < pages), mask=i < pages)
    tl.store(last_page_len + row, length - (pages - 1) * PAGE)
    tl.store(indptr + row + 1, begin + pages)
    tl.store(indptr + row, begin)  # the preceding row's program writes the same value


def page_indices(
    page_table: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    page_size: int,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
) -> None:
    """Compute `minisgl.plugins.kernels.ops.indices.page_indices` on a GPU."""
    rows = len(req_pool_indices)
    wide = max(256, triton.next_power_of_2(rows))  # so that nearly all steps share one compiled kernel
    page_indices_kernel[(rows,)](
        page_table, req_pool_indices, seq_lens, indptr, indices, last_page_len, rows, page_table.stride(0),
        PAGE=page_size, ROWS=wide, BLOCK=1024, num_warps=4,
    )  # fmt: skip
