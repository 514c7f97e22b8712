"""``moe=triton``: experts as grouped matrix products in Triton.

The backend sorts the (token, choice) pairs by expert into blocks, multiplies each block with its expert's weights,
weights the rows and adds them up by token. That is five launches per layer for any routing, or six with many tokens,
and the host never waits for the device. Only the weights of experts that some token chose are read. The kernels are in
`minisgl.plugins.kernels.ops.triton.moe`; this module chooses their tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from minisgl.config import ConfigError
from minisgl.hooks import hookimpl
from minisgl.plugins.moe import MoeBackend
from minisgl.utils.launch import one_launch

if TYPE_CHECKING:
    from minisgl.plugins.kernels.ops.fp8 import Fp8Weight
    from minisgl.plugins.kernels.ops.triton.moe import Extras, Tiles
    from minisgl.plugins.kernels.ops.triton.moe_mx import MxWeight

H200 = (
    # (most pairs per expert on average, tile of the first product, tile of the second product). A tile is (m, n, k,
    # warps, stages); in the first product, n columns of gate and n of up are computed.
    (16, (16, 64, 128, 4, 4), (16, 64, 128, 4, 4)),
    (32, (32, 64, 64, 4, 4), (32, 128, 64, 4, 4)),
    (96, (64, 64, 64, 4, 4), (64, 128, 64, 4, 4)),
    (1 << 31, (128, 64, 64, 8, 4), (128, 128, 64, 8, 4)),
)
"""Tiles measured on an H200. Both tiles of a row have the same m, because both products use the same sorted pairs."""
H200_TMA = (
    (16, (16, 64, 128, 4, 4), (16, 128, 128, 4, 3)),
    (32, (32, 64, 64, 4, 4), (32, 128, 64, 4, 4)),
    (96, (64, 64, 64, 4, 3), (64, 128, 64, 4, 3)),
    (1 << 31, (128, 128, 64, 8, 4), (128, 256, 64, 8, 4)),
)
"""Tiles of the kernels that load by TMA, measured on an H200, in the form of `H200`."""


@dataclass
class Triton:
    """Grouped matrix products in Triton; on a CPU only under TRITON_INTERPRET=1 (slow)."""

    def build(self, device: torch.device) -> MoeBackend:
        return TritonMoe(device)


class Experts(NamedTuple):
    """This rank's slice of the weights of the experts, whose global numbers begin at ``first``."""

    gate_up: torch.Tensor
    down: torch.Tensor
    first: int
    act: str
    extras: Extras


class Fp8Experts(NamedTuple):
    """Experts in FP8, as `TritonMoe.load_fp8` got them."""

    gate_up: Fp8Weight
    down: Fp8Weight
    first: int
    act: str


class MxExperts(NamedTuple):
    """Experts in MXFP4, as `TritonMoe.load_mxfp4` got them."""

    gate_up: MxWeight
    down: MxWeight
    act: str
    extras: Extras


class TritonMoe:
    """The backend; see `minisgl.plugins.moe.MoeBackend` for shapes.

    Raises `ConfigError` on a CPU, unless Triton runs interpreted.
    """

    def __init__(self, device: torch.device):
        import triton

        from minisgl.plugins.kernels.ops.triton import decode_layer, moe, moe_fp8, moe_mx, moe_tma

        if device.type != "cuda" and not triton.knobs.runtime.interpret:
            raise ConfigError("this backend needs a CUDA device. On a CPU use moe=torch (or TRITON_INTERPRET=1: slow).")
        self.kernels, self.tma_kernels, self.decode_kernels = moe, moe_tma, decode_layer
        self.fp8_kernels, self.mx_kernels = moe_fp8, moe_mx
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            self.load_fp8 = None  # type: ignore[assignment]  # the GPU has no e4m3

    def load(self, gate_up: torch.Tensor, down: torch.Tensor, experts: range, activation: str) -> Experts:
        """Make the weights' last dimension contiguous: see `MoeBackend.load`.

        Raises `ConfigError` for an activation that the kernels don't have.
        """
        from minisgl.plugins.kernels.ops.activation import ACTS

        if activation not in ACTS:
            raise ConfigError(f"moe=triton has no activation {activation!r}: use {', '.join(ACTS)}.")
        if gate_up.stride(2) != 1 or down.stride(2) != 1:
            gate_up, down = gate_up.contiguous(), down.contiguous()
        return Experts(gate_up, down, experts.start, ACTS[activation], self.kernels.Extras())

    def load_clamped(
        self,
        gate_up: torch.Tensor,
        gate_up_bias: torch.Tensor,
        down: torch.Tensor,
        down_bias: torch.Tensor | None,
        alpha: float,
        limit: float,
    ) -> Experts:
        """Prepare experts with biases and clamped gates: see `minisgl.plugins.models.gpt_oss.Experts`.

        gate_up [experts, 2·inner, hidden] and gate_up_bias [experts, 2·inner] have the rows of the gates first.
        """
        extras = self.kernels.Extras(gate_up_bias, down_bias, alpha, limit)
        return Experts(gate_up, down.contiguous(), 0, "clamped", extras)

    def load_fp8(self, gate_up: Fp8Weight, down: Fp8Weight, experts: range, activation: str) -> Fp8Experts:
        """Prepare experts in FP8: see `minisgl.plugins.moe.torch.TorchMoe.load_fp8`, and `load` for errors."""
        act = self.load(gate_up.values, down.values, experts, activation).act
        return Fp8Experts(gate_up, down, experts.start, act)

    def load_mxfp4(
        self,
        gate_up: tuple[torch.Tensor, torch.Tensor],
        gate_up_bias: torch.Tensor,
        down: tuple[torch.Tensor, torch.Tensor],
        down_bias: torch.Tensor | None,
        alpha: float,
        limit: float,
    ) -> MxExperts:
        """Prepare such experts in MXFP4: see `load_clamped`, and `minisgl.plugins.kernels.ops.triton.moe_mx.MxWeight`.

        A weight has packed numbers [experts, out, in / 2] and scales [experts, out, in / 32].
        """
        extras = self.kernels.Extras(gate_up_bias, down_bias, alpha, limit)
        packed = self.mx_kernels.MxWeight
        return MxExperts(packed(*gate_up), packed(*down), "clamped", extras)

    def tiles(self, pairs: int, experts: int, dtype: torch.dtype, tma: bool = False) -> tuple[Tiles, Tiles]:
        """Return the tiles of both products, for ``pairs`` pairs over ``experts`` experts.

        With few pairs per expert the blocks are small, because padding rows are computed too. ``tma``: for the kernels
        that load weights by TMA.
        """
        if dtype == torch.float32:  # no tensor cores: small tiles, or registers spill
            return self.kernels.Tiles(16, 32, 32, 4, 1), self.kernels.Tiles(16, 32, 32, 4, 1)
        row = next(row for row in (H200_TMA if tma else H200) if pairs <= row[0] * experts)
        return self.kernels.Tiles(*row[1]), self.kernels.Tiles(*row[2])

    @one_launch
    def forward(
        self, weights: Any, x: torch.Tensor, ids: torch.Tensor, scale: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Sort, multiply twice and sum: see `MoeBackend.forward`."""
        from minisgl.plugins.kernels.ops.triton.align import align

        if isinstance(weights, Fp8Experts):
            return self._forward_fp8(weights, x, ids, scale, out)
        if isinstance(weights, MxExperts):
            return self._forward_mxfp4(weights, x, ids, scale, out)
        gate_up, down, first, act, extras = weights
        experts, top_k = len(down), ids.shape[1]
        tma = self.tma_kernels.serves(x, gate_up, down)
        products = self.tma_kernels if tma else self.kernels
        up_tiles, down_tiles = self.tiles(ids.numel(), experts, x.dtype, tma)
        pairs, owner = align(ids, first, experts, up_tiles.m)
        inner = products.up(x, gate_up, pairs, owner, top_k, act, up_tiles, extras)
        parts = products.down(inner, down, scale, pairs, owner, down_tiles, extras)
        return self.kernels.sum_pairs(parts, ids, first, experts, out)

    def _forward_fp8(
        self, weights: Fp8Experts, x: torch.Tensor, ids: torch.Tensor, scale: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Quantise the rows, then sort, multiply twice and sum. The first product quantises its result."""
        from minisgl.plugins.kernels.ops.triton.align import align

        gate_up, down, first, act = weights
        experts, top_k, kernels = len(down.values), ids.shape[1], self.fp8_kernels
        rows = kernels.quantize_rows(x)
        pairs, owner = align(ids, first, experts, kernels.block_of(ids.numel(), experts))
        inner = kernels.up(rows, gate_up, pairs, owner, top_k, act)
        parts = kernels.down(inner, down, scale, pairs, owner)
        return self.kernels.sum_pairs(parts, ids, first, experts, out)

    def _forward_mxfp4(
        self, weights: MxExperts, x: torch.Tensor, ids: torch.Tensor, scale: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Sort, multiply twice and sum; activations stay in 16 bits."""
        from minisgl.plugins.kernels.ops.triton.align import align

        gate_up, down, act, extras = weights
        experts, top_k, kernels = len(down.packed), ids.shape[1], self.mx_kernels
        pairs, owner = align(ids, 0, experts, kernels.block_of(ids.numel(), experts))
        inner = kernels.up(x, gate_up, pairs, owner, top_k, act, extras)
        parts = kernels.down(inner, down, scale, pairs, owner, extras)
        return self.kernels.sum_pairs(parts, ids, 0, experts, out)

    def serves_routed(self, weights: Any, x: torch.Tensor) -> bool:
        """Return whether `forward_routed` supports these experts: see `RoutedDecode.serves_routed`."""
        if isinstance(weights, Fp8Experts | MxExperts):
            return False
        return self.decode_kernels.serves_experts(x, weights.gate_up, weights.down) and weights.first == 0

    def forward_routed(
        self,
        weights: Experts,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        logits: torch.Tensor,
        top_k: int,
        renormalize: bool,
    ) -> torch.Tensor:
        """Compute a few rows in two launches, without sorting: see `RoutedDecode.forward_routed`."""
        gate_up, down, _, act, _ = weights
        return self.decode_kernels.experts(x, norm_weight, eps, logits, gate_up, down, top_k, renormalize, act)


@hookimpl
def minisgl_configs() -> Any:
    """Register the options of this plugin."""
    yield "moe", "triton", Triton
