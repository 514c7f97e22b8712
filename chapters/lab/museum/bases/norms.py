"""RMSNorm in a Triton kernel: a program for each row, whose numbers are read in vectors of four."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from minisgl.hooks import hookimpl
from minisgl.layers.attention import RMSNorm
from minisgl.models.converter import Kernels, convert

if TYPE_CHECKING:
    import triton.language as tl
    from triton.language import constexpr


@dataclass
class Norms:
    """RMSNorm in one Triton kernel, which is interpreted on a CPU."""

    def build(self, device: torch.device) -> Kernels:
        return NormKernels(Launcher(device))


def norm_kernel(x: Any, weight: Any, out: Any, stride: Any, dim: Any, eps: Any, vectors: constexpr) -> None:
    """Write the RMSNorm of one row of x to out. ``vectors`` is a power of two; 4 * vectors is at least ``dim``."""
    row = tl.program_id(0)
    first = tl.arange(0, vectors)[:, None] * 4
    column = first + tl.arange(0, 4)[None, :]
    inside = column < dim
    wide = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(tl.sum(wide * wide, 1), 0) / dim + eps)
    by = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * dim + column, (wide * scale * by).to(out.dtype.element_ty), mask=inside)


class Launcher:
    """Launches the kernel. Triton is imported for the first launcher. On a CPU, it is then an interpreter."""

    def __init__(self, device: torch.device):
        global tl  # the kernel's name for Triton's language
        if device.type == "cpu":
            os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
        import triton
        import triton.language as tl

        self.kernel, self.next_power_of_2 = triton.jit(norm_kernel), triton.next_power_of_2

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the RMSNorm of x [..., dim]."""
        rows = x if x.dim() == 2 else x.reshape(-1, len(weight))
        out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        if len(rows):
            vectors = self.next_power_of_2(-(-len(weight) // 4))
            self.kernel[(len(rows),)](rows, weight, out, rows.stride(0), len(weight), eps, vectors=vectors)
        return out.view(x.shape)


class FusedNorm(RMSNorm):
    """`RMSNorm` in one launch."""

    launcher: Launcher

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., dim]."""
        return self.launcher.norm(x, self.weight, self.eps)


class NormKernels(Kernels):
    """Gives the norms of a model the kernel."""

    def __init__(self, launcher: Launcher):
        self.launcher = launcher

    def after_loading(self, model: nn.Module) -> None:
        """Convert the norms."""
        convert(model, {RMSNorm: FusedNorm})
        for module in model.modules():
            if isinstance(module, FusedNorm):
                module.launcher = self.launcher


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "kernels", "museum", Norms
