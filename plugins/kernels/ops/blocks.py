"""The largest number of blocks of (token, choice) pairs that a grouped matrix product can need.

Pure arithmetic, used by both versions of `minisgl.plugins.kernels.ops.align.align`: the torch reference and the Triton
kernels.
"""

from __future__ import annotations


def max_blocks(pairs: int, experts: int, block: int) -> int:
    """Return the largest number of blocks of ``block`` pairs that ``pairs`` pairs over ``experts`` experts can need."""
    used = min(pairs, experts)
    return used + (pairs - used) // block
