"""Experts in FP8: an MoE layer whose matrices are e4m3 with a scale for each block of 128 × 128.

The MoE backend multiplies them, if it has the method ``load_fp8`` (`minisgl.plugins.moe.MoeBackend`). Each expert's
slice of a rank must have whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from minisgl.layers.weight_shards import WeightShard
from minisgl.plugins.kernels.ops.fp8 import BLOCK, E4M3, Fp8Weight, blocks
from minisgl.plugins.models.experts import MoELayer
from minisgl.plugins.quantization.e4m3.matrix import Fp8, fp8_shards

__all__ = ["Fp8Experts", "refuse"]


def refuse(layer: MoELayer) -> str:
    """Return why the experts of a layer that is not loaded can't be in FP8, or ""."""
    assert layer.down is not None
    _, hidden, inner = layer.down.shape
    if getattr(layer.moe, "load_fp8", None) is None:
        return f"the MoE backend {type(layer.moe).__name__} has no products in FP8"
    if hidden % BLOCK or inner % BLOCK:
        return f"an expert's matrices of {inner} × {hidden} on a rank do not have whole blocks of {BLOCK} × {BLOCK}"
    return ""


class Fp8Experts(MoELayer):
    """The experts of an `MoELayer` in FP8: a base of the class that the layer gets."""

    weights_in: ClassVar[str] = "FP8"
    fp8: Fp8
    dtype: torch.dtype
    scales: tuple[nn.Parameter, nn.Parameter]
    plain: type[MoELayer]

    @staticmethod
    def convert(layer: MoELayer, fp8: Fp8, dtype: torch.dtype, device: torch.device) -> None:
        """Replace the experts' weights of ``layer``, which is not loaded, by e4m3 and scales on ``device``."""
        assert layer.gate_up is not None
        assert layer.down is not None
        plain = type(layer)
        routing = {"softmax_routing": vars(plain).get("softmax_routing", False), "plain": plain}
        layer.__class__ = type(f"Fp8{plain.__name__}", (Fp8Experts, plain), routing)
        assert isinstance(layer, Fp8Experts)
        layer.fp8, layer.dtype = fp8, dtype

        def empty(weight: nn.Parameter) -> tuple[nn.Parameter, nn.Parameter]:
            experts, out, inner = weight.shape
            values = torch.empty(weight.shape, dtype=E4M3, device=device)
            scale_inv = torch.empty((experts, blocks(out), blocks(inner)), device=device)
            return nn.Parameter(values, requires_grad=False), nn.Parameter(scale_inv, requires_grad=False)

        layer.gate_up, up_scales = empty(layer.gate_up)
        layer.down, down_scales = empty(layer.down)
        layer.scales = (up_scales, down_scales)

    def expert_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Yield this rank's slice of every expert, and of its scales. All experts are in FP8, or none."""
        assert self.gate_up is not None
        assert self.down is not None
        experts, hidden, here = self.down.shape
        inner, start = self.inner_size, self.comm.rank * here
        stacked = names is None or f"{prefix}experts.gate_up_proj" in names
        if stacked:
            stored = [f"{prefix}experts.{name}_proj" for name in ("gate_up", "down")]
        else:
            matrices = [(e, name) for e in range(experts) for name in ("gate", "up", "down")]
            stored = [f"{prefix}experts.{e}.{name}_proj.weight" for e, name in matrices]
        if not self.fp8.serves(stored, names):
            yield from self._become_plain().expert_shards(prefix, names)
            return
        up_scales, down_scales = self.scales
        gate = Fp8Weight(self.gate_up[:, :here], up_scales[:, : here // BLOCK])
        up = Fp8Weight(self.gate_up[:, here:], up_scales[:, here // BLOCK :])
        down = Fp8Weight(self.down, down_scales)
        if stacked:
            both = (experts, 2 * inner, hidden)
            for name, shape, dim, begin, target in (
                (stored[0], both, 1, start, gate),
                (stored[0], both, 1, inner + start, up),
                (stored[1], (experts, hidden, inner), 2, start, down),
            ):
                yield from fp8_shards(self.fp8, self.dtype, name, shape, dim, begin, target, names)
            return
        for (e, name), full in zip(matrices, stored, strict=True):
            whole = {"gate": gate, "up": up, "down": down}[name]
            target = Fp8Weight(whole.values[e], whole.scale_inv[e])
            size, dim = ((hidden, inner), 1) if name == "down" else ((inner, hidden), 0)
            yield from fp8_shards(self.fp8, self.dtype, full, size, dim, start, target, names)

    def _become_plain(self) -> MoELayer:
        """Return this layer, with experts in 16 bits from now on."""
        assert self.gate_up is not None
        assert self.down is not None
        for name in ("gate_up", "down"):
            values = getattr(self, name)
            wide = torch.empty(values.shape, dtype=self.dtype, device=values.device)
            setattr(self, name, nn.Parameter(wide, requires_grad=False))
        del self.scales, self.fp8
        layer: Any = self
        layer.__class__ = self.plain
        return layer  # type: ignore[no-any-return]

    def after_load(self) -> None:
        """Pass the experts' weights to the MoE backend, and drop the layer's own references."""
        assert self.gate_up is not None
        assert self.down is not None
        up_scales, down_scales = self.scales
        if self.silenced is not None:
            self.down[self.silenced] = 0
        moe: Any = self.moe
        gate_up, down = Fp8Weight(self.gate_up, up_scales), Fp8Weight(self.down, down_scales)
        self.experts = moe.load_fp8(gate_up, down, range(self.num_experts), self.act)
        self.gate_up = self.down = None
        del self.scales
