"""The built-in attention backends (group `attention`), one file each."""

from __future__ import annotations

from dataclasses import replace

from minisgl.attention import AttnBatch


def slice_rows(batch: AttnBatch, first: int, last: int) -> AttnBatch:
    """Return rows ``first`` to ``last`` (exclusive) as a batch of their own. No KV or page table is copied."""
    starts = batch.cu_seqlens_q[first : last + 1]
    return replace(
        batch,
        num_decode=max(0, min(batch.num_decode, last) - first),
        cu_seqlens_q_cpu=batch.cu_seqlens_q_cpu[first : last + 1] - batch.cu_seqlens_q_cpu[first],
        seq_lens_cpu=batch.seq_lens_cpu[first:last],
        cu_seqlens_q=starts - starts[0] if first else starts,
        seq_lens=batch.seq_lens[first:last],
        req_pool_indices=batch.req_pool_indices[first:last],
    )
