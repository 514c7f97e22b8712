"""RMSNorm layers. `RMSNormFused` also adds the residual, and all-reduces the partial sum of the preceding layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.layers.context import Context
from minisgl.layers.weight_shards import WeightShard


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension (Zhang and Sennrich, 2019), computed in float32."""

    def __init__(self, dim: int, eps: float, ctx: Context):
        super().__init__()
        self.weight = ctx.parameter(dim)
        self.eps = eps

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Yield the weight, which every rank holds in full."""
        yield WeightShard.whole(f"{prefix}weight", self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., dim]; returns a tensor of the same shape."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class RMSNormFused(RMSNorm):
    """RMSNorm of the sum of x and the residual stream.

    With ``partial`` and several ranks, x is a partial sum and is first all-reduced over the ranks. All-reduce, addition
    and norm are then one call of the communicator, which can fuse them into one launch.
    """

    def __init__(self, dim: int, eps: float, ctx: Context, *, partial: bool = True):
        super().__init__(dim, eps, ctx)
        self.comm = ctx.comm if partial and ctx.comm.size > 1 else None

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return ``(norm(x + residual), x + residual)`` for x and residual [tokens, dim].

        With ``partial``, x here means its sum over the ranks. Without ``residual``, x itself starts the residual stream
        and must not be a partial sum; the result is ``(norm(x), x)``. x may be overwritten.
        """
        if residual is not None:
            if self.comm is not None:
                return self.comm.all_reduce_norm(x, residual, self.weight, self.eps)
            x = x.add_(residual)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps), x
