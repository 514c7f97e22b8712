"""RMSNorm layers.

`RMSNormFused` also adds the residual, all-reduces the partial sum that the preceding layer returned, and quantises its
result for an FP8 product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from minisgl.layers.context import Context
from minisgl.layers.weight_shards import WeightShard
from minisgl.plugins.kernels.ops.fp8 import QuantizedRows
from minisgl.plugins.kernels.ops.norm import add_rms_norm, prepare, rms_norm, rms_norm_quantized


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, dim: int, eps: float, ctx: Context):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, dtype=ctx.dtype, device=ctx.device), requires_grad=False)
        self.eps = eps

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Yield the weight, which every rank holds in full."""
        yield WeightShard.whole(f"{prefix}weight", self.weight)

    def after_load(self) -> None:
        """Compile the kernel: see `minisgl.plugins.kernels.ops.norm.prepare`."""
        prepare(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., dim]; returns a tensor of the same shape."""
        return rms_norm(x, self.weight, self.eps)


class RMSNormFused(RMSNorm):
    """RMSNorm of the sum of x and the residual stream.

    With ``partial`` and several ranks, x is a partial sum and is first all-reduced over the ranks. All-reduce, addition
    and norm are then one call of the communicator, which can fuse them into one launch. ``before`` is the layer that
    gets the result. If its method ``takes_quantized`` returns true for a number of tokens, it gets `QuantizedRows`.
    """

    def __init__(self, dim: int, eps: float, ctx: Context, *, partial: bool = True, before: nn.Module | None = None):
        super().__init__(dim, eps, ctx)
        self.comm = ctx.comm if partial and ctx.comm.size > 1 else None
        self.takes_quantized: Callable[[int], bool] | None = getattr(before, "takes_quantized", None)

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor | QuantizedRows, Tensor]:
        """Return ``(norm(x + residual), x + residual)`` for x and residual [tokens, dim].

        With ``partial``, x here means its sum over the ranks. Without ``residual``, x itself starts the residual stream
        and must not be a partial sum; the result is ``(norm(x), x)``. x may be overwritten.
        """
        if residual is not None and self.comm is not None:
            return self.comm.all_reduce_norm(x, residual, self.weight, self.eps)
        if self.takes_quantized is not None and self.takes_quantized(len(x)):
            return rms_norm_quantized(x, residual, self.weight, self.eps)
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, residual, self.weight, self.eps)
