"""Layers of linear attention with the gated delta rule, whose decode rows are computed by Triton kernels on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["FastDecode", "convert_gated_delta"]


class FastDecode:
    """The decode rows of a layer in two launches: a base of the class that the layer gets.

    The layer's own class says with ``gated_delta_rule`` that it computes what
    `minisgl.plugins.models.gated_delta.GatedDeltaNet` computes between its projections.
    """

    triton: Any
    heads: Any
    weights: Any

    def mix(
        self, states: list[Tensor], pieces: list[Any], mixed: Tensor, gate: Tensor, beta: Tensor, decay: Tensor,
        out: Tensor,
    ) -> None:  # fmt: skip
        """Absorb the tokens of the step: see `minisgl.plugins.models.gated_delta.GatedDeltaNet.mix`."""
        batch = self.ctx.batch  # type: ignore[attr-defined]
        if n := batch.num_decode:
            self.triton.decode(
                mixed[:n], gate[:n], beta[:n], decay[:n], states, batch.req_pool_indices[:n], batch.seq_lens[:n],
                self.weights, self.heads, out[:n],
            )  # fmt: skip
            pieces = pieces[1:]
        if pieces:
            super().mix(states, pieces, mixed, gate, beta, decay, out)  # type: ignore[misc]


def convert_gated_delta(model: nn.Module) -> None:
    """Convert the layers of a loaded ``model`` that are on a GPU, or anywhere under Triton's interpreter."""
    for module in model.modules():
        kind: Any = type(module)
        if not vars(kind).get("gated_delta_rule") or not _runs(module.conv):  # type: ignore[arg-type]
            continue
        from minisgl.plugins.kernels.ops.triton import gated_delta

        layer: Any = module
        heads = gated_delta.Heads(layer.k_heads, layer.ratio, layer.dk, layer.dv)
        if gated_delta.serves(heads, layer.kernel):
            layer.triton, layer.heads = gated_delta, heads
            layer.weights = gated_delta.Weights(
                layer.conv, layer.dt_bias, layer.A_log, layer.norm.weight, layer.norm.eps
            )
            layer.__class__ = type("FastGatedDelta", (FastDecode, kind), {})


def _runs(x: Tensor) -> bool:
    """Return whether Triton kernels can read tensor x."""
    try:
        import triton
    except ImportError:
        return False
    return x.is_cuda or bool(triton.knobs.runtime.interpret and x.dtype != torch.bfloat16)
