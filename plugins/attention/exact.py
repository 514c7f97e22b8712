"""`attention=exact`: the bits of a query's result depend on its own row only.

On a CPU it is the C++ kernel for all rows, because its order of sums depends on the positions of a row only:
`minisgl.plugins.attention.cpp` computes chunks of more than 512 tokens by another backend, which is faster. On a GPU it
is `minisgl.plugins.kernels.ops.triton.exact_attention`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from minisgl.attention import AttentionBackend, AttnNeeds, LayerSpec, QKNorm
from minisgl.hooks import hookimpl
from minisgl.plugins.attention.triton import Triton, TritonAttention
from minisgl.plugins.kernels.exact import in_triton
from minisgl.utils.launch import one_launch

if TYPE_CHECKING:
    from minisgl.plugins.kernels.ops.triton.attention import Heads, Tile


@dataclass
class Exact:
    """Attention in one order for rows of any length: in C++ on a CPU, in Triton on a GPU."""

    def build(self, device: torch.device, build_other: Callable[[str], AttentionBackend]) -> AttentionBackend:
        if in_triton(device):
            return ExactTritonAttention(Triton(programs_per_sm=2), device)
        from minisgl.plugins.attention.cpp import CppAttention

        return CppAttention(build_other("torch"), device, max_query_tokens=sys.maxsize)


class ExactTritonAttention(TritonAttention):
    """`TritonAttention` with kernels whose order of sums depends on the positions of a row only."""

    def needs(self) -> AttnNeeds:
        return replace(super().needs(), shared_prefix=False, fused_rows=0)

    def extend_tile(self, longest: int, heads: Heads) -> Tile:
        """Return the tile of all rows."""
        from minisgl.plugins.kernels.ops.triton import exact_attention

        return exact_attention.tile_of(heads, self.pool.dtype)

    @one_launch
    def forward(self, layer: LayerSpec, q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Launch the kernel for decode rows and for the others. ``q`` and ``out`` are [tokens, q_heads, head_dim]."""
        from minisgl.plugins.kernels.ops.triton.exact_attention import attention

        assert self.batch is not None
        batch, heads, pages = self.batch, self.layers[layer.index], self._pages(layer)
        if n := batch.num_decode:
            attention(q[:n], out[:n], pages, heads, self.order.rows(n), None, self.programs)
        if self.extend is not None:
            cu_seqlens_q, tiles = self.extend
            rows = pages._replace(req_pool_indices=batch.req_pool_indices[n:], seq_lens=batch.seq_lens[n:])
            attention(q, out, rows, heads, tiles[heads.group][0], cu_seqlens_q, self.programs)
        return out

    def fuses(self, layer: LayerSpec, qkv: torch.Tensor) -> bool:
        """Return False: the fused kernels have another order of sums."""
        return False

    def _quantizes(self, layer: LayerSpec, rows: int) -> bool:
        """Return False: no launch quantises its result."""
        return False

    def norm_rope_store(
        self,
        layer: LayerSpec,
        qkv: torch.Tensor,
        norm: QKNorm | None,
        cos_sin: torch.Tensor,
        out_cache_loc: torch.Tensor,
    ) -> torch.Tensor:
        """Compute `AttentionBackend.norm_rope_store` in one launch, of one shape for any number of tokens."""
        from minisgl.plugins.kernels.ops.triton import rope

        heads = (layer.q_heads, layer.kv_heads)
        return rope.norm_rope_store(qkv, *heads, norm, cos_sin, self.pool, layer.index, out_cache_loc, warps=4)


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "attention", "exact", Exact
