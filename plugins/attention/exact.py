"""`attention=exact`: the C++ kernel for all rows, because its order of sums depends on the positions of a row only.

`minisgl.plugins.attention.cpp` computes chunks of more than 512 tokens by another backend, which is faster.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    import torch

    from minisgl.attention import AttentionBackend


@dataclass
class Exact:
    """Attention in C++ for rows of any length, in one order. CPU only, float32 or bfloat16."""

    def build(self, device: torch.device, build_other: Callable[[str], AttentionBackend]) -> AttentionBackend:
        from minisgl.plugins.attention.cpp import CppAttention

        return CppAttention(build_other("torch"), device, max_query_tokens=sys.maxsize)


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "attention", "exact", Exact
