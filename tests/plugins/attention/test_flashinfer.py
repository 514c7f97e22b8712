"""attention=flashinfer without a GPU: which of its two kernels prompts take; tests/gpu has what they compute."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl.plugins.attention.flashinfer import packs


@pytest.mark.parametrize(
    ("rows", "tokens", "before", "faster"),  # with 16 query heads, as measured: docs/benchmarks/attention.md
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
def test_a_step_takes_the_kernel_that_was_measured_faster(rows: int, tokens: int, before: int, faster: bool) -> None:
    starts = np.arange(rows + 1, dtype=np.int32) * tokens
    assert packs(starts, np.full(rows, before + tokens, np.int32), 16) == faster
