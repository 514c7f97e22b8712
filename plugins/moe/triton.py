"""Experts as grouped matrix products in Triton: five launches a layer, whatever the routing, and no wait for it.

Sort the (token, choice) pairs by expert into blocks, multiply each block with its expert, weight, add up. Only experts
that some token chose are read from memory. The kernels are in `minisgl.kernel.triton.moe`; this picks their tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from minisgl.config import ConfigError
from minisgl.hooks import hookimpl
from minisgl.kernel.launch import one_launch
from minisgl.moe import MoeBackend

if TYPE_CHECKING:
    from minisgl.kernel.triton.moe import Tiles

H200 = (
    # pairs an expert, at most; first product and second: (m, n, k, warps, stages). n counts gate and up once.
    (16, (16, 64, 128, 4, 4), (16, 64, 128, 4, 4)),
    (32, (32, 64, 64, 4, 4), (32, 128, 64, 4, 4)),
    (96, (64, 64, 64, 4, 4), (64, 128, 64, 4, 4)),
    (1 << 31, (128, 64, 64, 8, 4), (128, 128, 64, 8, 4)),
)
"""Both products of a row have the same m: they share the sorted pairs."""


@dataclass
class Triton:
    """Grouped matrix products in Triton; on a CPU only under TRITON_INTERPRET=1 (slow)."""


class Experts(NamedTuple):
    """This rank's share of each expert, numbered from ``first`` on."""

    gate_up: torch.Tensor
    down: torch.Tensor
    first: int
    act: str


class TritonMoe:
    """See `minisgl.moe.MoeBackend` for shapes."""

    def __init__(self, device: torch.device):
        import triton

        from minisgl.kernel.triton import moe

        if device.type != "cuda" and not triton.knobs.runtime.interpret:
            raise ConfigError("it needs a CUDA device. On a CPU use moe=torch (or TRITON_INTERPRET=1, which is slow).")
        self.kernels = moe

    def load(self, gate_up: torch.Tensor, down: torch.Tensor, experts: range, activation: str) -> Experts:
        from minisgl.kernel.activation import ACTS

        if activation not in ACTS:
            raise ConfigError(f"moe=triton has no activation {activation!r}: use {', '.join(ACTS)}.")
        if gate_up.stride(2) != 1 or down.stride(2) != 1:
            gate_up, down = gate_up.contiguous(), down.contiguous()
        return Experts(gate_up, down, experts.start, ACTS[activation])

    def tiles(self, pairs: int, experts: int, dtype: torch.dtype) -> tuple[Tiles, Tiles]:
        """Of both products: small blocks while most experts have few rows, for padding is computed too."""
        if dtype == torch.float32:  # no tensor cores: small tiles, or registers spill
            return self.kernels.Tiles(16, 32, 32, 4, 1), self.kernels.Tiles(16, 32, 32, 4, 1)
        row = next(row for row in H200 if pairs <= row[0] * experts)
        return self.kernels.Tiles(*row[1]), self.kernels.Tiles(*row[2])

    @one_launch
    def forward(
        self, weights: Experts, x: torch.Tensor, ids: torch.Tensor, scale: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        from minisgl.kernel.triton.align import align

        gate_up, down, first, act = weights
        experts, top_k = len(down), ids.shape[1]
        up_tiles, down_tiles = self.tiles(ids.numel(), experts, x.dtype)
        pairs, owner = align(ids, first, experts, up_tiles.m)
        inner = self.kernels.up(x, gate_up, pairs, owner, top_k, act, up_tiles)
        parts = self.kernels.down(inner, down, scale, pairs, owner, down_tiles)
        return self.kernels.sum_pairs(parts, ids, first, experts, out)


@hookimpl
def minisgl_configs() -> Any:
    yield "moe", "triton", Triton


@hookimpl
def minisgl_moe(config: Any, device: torch.device) -> MoeBackend | None:
    return TritonMoe(device) if isinstance(config, Triton) else None
