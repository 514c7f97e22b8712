"""How many blocks of (token, choice) pairs a grouped matrix product can need. Pure arithmetic, for torch and Triton."""

from __future__ import annotations


def max_blocks(pairs: int, experts: int, block: int) -> int:
    """Return the number of blocks that ``pairs`` pairs over ``experts`` experts need at most, in any routing."""
    used = min(pairs, experts)
    return used + (pairs - used) // block
