"""``kernels=fused``: RMSNorm, and the addition before it, each in one Triton kernel. For readers.

On a GPU, Triton compiles the kernels. On a CPU, Triton's interpreter executes them in Python: exact, and slow. Faster
kernels of more layers are those of ``kernels=triton`` and ``kernels=cpp``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from minisgl.config import ConfigError
from minisgl.hooks import hookimpl
from minisgl.layers.attention import RMSNorm, RMSNormFused
from minisgl.models.converter import Kernels, convert

if TYPE_CHECKING:
    import triton.language as tl
    from triton.language import constexpr

TILE = 16
"""Rows that one program of a kernel computes."""


@dataclass
class Fused:
    """RMSNorm, and the addition before it, each in one Triton kernel; interpreted on a CPU: short, and slow."""

    def build(self, device: torch.device) -> Kernels:
        return FusedKernels(Launcher(device))


# lab: fuse.norm
def norm_kernel(
    x: Any, weight: Any, out: Any, rows: Any, stride: Any, dim: Any, eps: Any, tile: constexpr, block: constexpr
) -> None:
    """Write the RMSNorm of ``tile`` rows of x to out: x / sqrt(mean(x * x) + eps) * weight.

    Program p has the rows from p * tile on, of ``rows``. Row r of x begins at ``x + r * stride``, row r of out
    at ``out + r * dim``. ``weight`` has ``dim`` numbers. ``block`` is a power of two, at least ``dim``.
    """
    # 1. Of memory that belongs to no row or column, nothing is read and nothing is written.
    # 2. Squares and sums are in float32, whatever the dtype of x. The result has out's dtype: `out.dtype.element_ty`.
    # 3. Each number of x is read once.
    row = tl.program_id(0) * tile + tl.arange(0, tile)[:, None]
    column = tl.arange(0, block)[None, :]
    is_real = (row < rows) & (column < dim)
    wide = tl.load(x + row * stride + column, mask=is_real, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / dim + eps)[:, None]
    by = tl.load(weight + column, mask=column < dim, other=0.0).to(tl.float32)
    tl.store(out + row * dim + column, (wide * scale * by).to(out.dtype.element_ty), mask=is_real)


# lab: end


# lab: fuse.add
def add_norm_kernel(
    x: Any, residual: Any, weight: Any, out: Any, total: Any, rows: Any, stride: Any, dim: Any, eps: Any,
    tile: constexpr, block: constexpr,
) -> None:  # fmt: skip
    """Write x + residual to total, and its RMSNorm to out. ``residual`` and ``total`` have rows of ``dim`` numbers.

    All else is as in `norm_kernel`.
    """
    # 1. Both results in one pass: each number of x and of residual is read once, and nothing that was written is read.
    # 2. The next layer reads total. So the norm is that of the sum as it is stored, rounded to the dtype of total.
    row = tl.program_id(0) * tile + tl.arange(0, tile)[:, None]
    column = tl.arange(0, block)[None, :]
    is_real = (row < rows) & (column < dim)
    added = tl.load(x + row * stride + column, mask=is_real, other=0.0).to(tl.float32)
    added += tl.load(residual + row * dim + column, mask=is_real, other=0.0).to(tl.float32)
    stored = added.to(total.dtype.element_ty)
    tl.store(total + row * dim + column, stored, mask=is_real)
    wide = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / dim + eps)[:, None]
    by = tl.load(weight + column, mask=column < dim, other=0.0).to(tl.float32)
    tl.store(out + row * dim + column, (wide * scale * by).to(out.dtype.element_ty), mask=is_real)


# lab: end


class Launcher:
    """Launches the kernels. Triton is imported for the first launcher. On a CPU, it is then an interpreter."""

    def __init__(self, device: torch.device):
        global tl  # the kernels' name for Triton's language
        if device.type == "cpu":
            os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
        import triton
        import triton.language as tl

        if device.type == "cpu" and type(tl.sum).__name__ == "JITFunction":
            raise ConfigError("Triton was imported as a compiler in this process: set TRITON_INTERPRET=1 before.")
        self.norm_kernel, self.add_norm_kernel = triton.jit(norm_kernel), triton.jit(add_norm_kernel)
        self.next_power_of_2 = triton.next_power_of_2

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the RMSNorm of x [..., dim]."""
        rows = x if x.dim() == 2 else x.reshape(-1, len(weight))
        out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        self._launch(self.norm_kernel, rows, weight, out, *self._sizes(rows, eps))
        return out.view(x.shape)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return the RMSNorm of x + residual, both [rows, dim], and the sum."""
        out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
        self._launch(self.add_norm_kernel, x, residual.contiguous(), weight, out, total, *self._sizes(x, eps))
        return out, total

    def _sizes(self, x: Tensor, eps: float) -> tuple[int, int, int, float]:
        return len(x), x.stride(0), x.shape[1], eps

    def _launch(self, kernel: Any, x: Tensor, *rest: Any) -> None:
        if len(x):
            block = self.next_power_of_2(x.shape[1])
            kernel[(-(-len(x) // TILE),)](x, *rest, tile=TILE, block=block)


class FusedNorm(RMSNorm):
    """`RMSNorm` in one launch."""

    launcher: Launcher

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., dim]."""
        return self.launcher.norm(x, self.weight, self.eps)


class FusedAddNorm(RMSNormFused):
    """`RMSNormFused` in one launch, unless several ranks add up x first."""

    launcher: Launcher

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return ``(norm(x + residual), x + residual)``: see `RMSNormFused`."""
        if residual is None:
            return self.launcher.norm(x, self.weight, self.eps), x
        if self.comm is not None:
            return super().forward(x, residual)
        return self.launcher.add_norm(x, residual, self.weight, self.eps)


class FusedKernels(Kernels):
    """Gives the norms of a model the kernels."""

    def __init__(self, launcher: Launcher):
        self.launcher = launcher

    def after_loading(self, model: nn.Module) -> None:
        """Convert the norms."""
        convert(model, {RMSNorm: FusedNorm, RMSNormFused: FusedAddNorm})
        for module in model.modules():
            if isinstance(module, FusedNorm | FusedAddNorm):
                module.launcher = self.launcher


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "kernels", "fused", Fused
