"""Tests of attention=flashinfer without a GPU: the choice of the prefill kernel. tests/gpu tests the results."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl.plugins.attention.flashinfer import packs_query_heads


@pytest.mark.parametrize(
    # Measured with 16 query heads: docs/benchmarks/attention.md. `packed`: the kernel that packs query heads is faster.
    ("rows", "tokens", "prefix", "packed"),
    [
        (128, 64, 2048, True),
        (256, 16, 240, True),
        (32, 64, 448, True),
        (8, 128, 1920, False),
        (8, 1024, 0, False),
        (4, 64, 960, False),
        (1, 128, 16_256, True),
        (1, 128, 896, False),
        (1, 2048, 14_336, False),
    ],
)
def test_packs_query_heads(rows: int, tokens: int, prefix: int, packed: bool) -> None:
    """`packs_query_heads` chooses the FlashInfer prefill kernel that was measured to be faster."""
    starts = np.arange(rows + 1, dtype=np.int32) * tokens
    assert packs_query_heads(starts, np.full(rows, prefix + tokens, np.int32), 16) == packed
