"""The flat page indices of a step's rows in one launch, in Triton. The plain twin is in `minisgl.kernel.indices`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(
    do_not_specialize=["rows", "stride_table"],
    do_not_specialize_on_alignment=["slots", "seq_lens", "indptr", "indices", "last_page_len"],
)
def page_indices_kernel(
    table, slots, seq_lens, indptr, indices, last_page_len, rows, stride_table,
    PAGE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row. Each adds up the pages of all rows before its own: cheaper than a second launch."""
    row = tl.program_id(0)
    other = tl.arange(0, ROWS)
    pages_of = tl.cdiv(tl.load(seq_lens + other, mask=other < rows, other=0), PAGE)
    begin = tl.sum(tl.where(other < row, pages_of, 0), 0)
    length = tl.load(seq_lens + row)
    pages = tl.cdiv(length, PAGE)
    row_table = table + tl.load(slots + row).to(tl.int64) * stride_table
    for start in range(0, pages, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(indices + begin + i, tl.load(row_table + i, mask=i < pages), mask=i < pages)
    tl.store(last_page_len + row, length - (pages - 1) * PAGE)
    tl.store(indptr + row + 1, begin + pages)
    tl.store(indptr + row, begin)  # as the row before it does: the same value


def page_indices(
    table: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    page_size: int,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
) -> None:
    rows = len(slots)
    wide = max(256, triton.next_power_of_2(rows))  # one compiled kernel for nearly all steps
    page_indices_kernel[(rows,)](
        table, slots, seq_lens, indptr, indices, last_page_len, rows, table.stride(0),
        PAGE=page_size, ROWS=wide, BLOCK=1024, num_warps=4,
    )  # fmt: skip
