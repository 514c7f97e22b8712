"""RMSNorm layers. The fused one also adds the residual, and sums over ranks what the layer before left partial."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minisgl.kernel.norm import add_rms_norm, rms_norm
from minisgl.layers.context import Context
from minisgl.layers.weight_shards import WeightShard


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, dim: int, eps: float, ctx: Context):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, dtype=ctx.dtype, device=ctx.device), requires_grad=False)
        self.eps = eps

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        yield WeightShard.whole(f"{prefix}weight", self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., dim] → [..., dim]."""
        return rms_norm(x, self.weight, self.eps)


class RMSNormFused(RMSNorm):
    """Adds the residual stream, then normalises. ``partial`` inputs are first summed over the ranks: all-reduce,
    add and norm are one call, so that a communicator can make them one launch."""

    def __init__(self, dim: int, eps: float, ctx: Context, *, partial: bool = True):
        super().__init__(dim, eps, ctx)
        self.comm = ctx.comm if partial and ctx.comm.size > 1 else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """x, residual [tokens, dim] → (norm(x + residual), x + residual). Without a residual, x begins the stream
        (and is no partial sum). x may be overwritten."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        if self.comm is not None:
            return self.comm.all_reduce_norm(x, residual, self.weight, self.eps)
        return add_rms_norm(x, residual, self.weight, self.eps)
