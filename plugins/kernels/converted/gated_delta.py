"""Layers of linear attention with the gated delta rule, which Triton kernels compute on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minisgl.attention import AttnBatch
from minisgl.core import I32

__all__ = ["FastGatedDelta", "convert_gated_delta"]


class FastGatedDelta:
    """The decode rows of a layer in two launches, its prompts in a few: a base of the class that the layer gets.

    The layer's own class says with ``gated_delta_rule`` that it computes what
    `minisgl.plugins.models.gated_delta.GatedDeltaNet` computes between its projections.
    """

    triton: Any
    prefill: Any
    heads: Any
    weights: Any

    def mix(
        self, states: list[Tensor], pieces: list[Any], mixed: Tensor, gate: Tensor, beta: Tensor, decay: Tensor,
        out: Tensor,
    ) -> None:  # fmt: skip
        """Absorb the tokens of the step: see `minisgl.plugins.models.gated_delta.GatedDeltaNet.mix`."""
        layer: Any = self
        batch, n = layer.ctx.batch, layer.ctx.batch.num_decode
        if layer.kept:  # the kernels can't take tokens back
            super().mix(states, pieces, mixed, gate, beta, decay, out)  # type: ignore[misc]
            return
        if n:
            self.triton.decode(
                mixed[:n], gate[:n], beta[:n], decay[:n], states, batch.req_pool_indices[:n], batch.seq_lens[:n],
                self.weights, self.heads, out[:n],
            )  # fmt: skip
            pieces = pieces[1:]
        if pieces and not self.prefill.serves(self.heads):
            super().mix(states, pieces, mixed, gate, beta, decay, out)  # type: ignore[misc]
        elif pieces:
            slots, shared = batch.req_pool_indices[n:], layer.pieces
            if shared.plan is None:
                parts, begins = prompt_parts(batch, layer.ctx.state_saves)
                shared.plan = self.prefill.plan(parts, begins, slots, layer.kernel)
            read = self.prefill.prefill(
                mixed[n:], beta[n:], decay[n:], states, slots, self.weights, self.heads, shared.plan
            )
            heads = (part.unflatten(-1, (layer.v_heads, layer.dv)) for part in (read, gate[n:]))
            out[n:] = layer.norm(*heads).flatten(1)


def prompt_parts(
    batch: AttnBatch, saves: tuple[I32, I32, I32] | None
) -> tuple[list[list[tuple[int, int, int]]], list[bool]]:
    """Return the parts of the prompts of a step, and which rows begin: see the function ``plan`` of the kernels.

    Tokens are counted from the first prompt's on. ``saves`` are those of `minisgl.core.Step.state_saves`.
    """
    stops: dict[int, list[tuple[int, int]]] = {}
    for row, position, slot in zip(*(column.tolist() for column in saves or ()), strict=True):
        stops.setdefault(row, []).append((position, slot))
    n, borders, lengths = batch.num_decode, batch.cu_seqlens_q_cpu.tolist(), batch.seq_lens_cpu.tolist()
    parts, begins = [], []
    for row in range(n, len(lengths)):
        first, end = borders[row] - borders[n], borders[row + 1] - borders[n]
        own, token = [], first
        for position, slot in [*stops.get(row, ()), (lengths[row], -1)]:
            stop = end - lengths[row] + position
            if stop > token:
                own.append((token, stop, slot))
                token = stop
        parts.append(own)
        begins.append(lengths[row] == end - first)
    return parts, begins


def convert_gated_delta(model: nn.Module) -> None:
    """Convert the layers of a loaded ``model`` that are on a GPU, or anywhere under Triton's interpreter."""
    for module in model.modules():
        kind: Any = type(module)
        if not vars(kind).get("gated_delta_rule") or not _runs(module.conv):  # type: ignore[arg-type]
            continue
        from minisgl.plugins.kernels.ops.triton import gated_delta, gated_delta_prefill

        layer: Any = module
        heads = gated_delta.Heads(layer.k_heads, layer.ratio, layer.dk, layer.dv)
        if gated_delta.serves(heads, layer.kernel):
            layer.triton, layer.prefill, layer.heads = gated_delta, gated_delta_prefill, heads
            layer.weights = gated_delta.Weights(
                layer.conv, layer.dt_bias, layer.A_log, layer.norm.weight, layer.norm.eps
            )
            layer.__class__ = type("FastGatedDelta", (FastGatedDelta, kind), {})


def _runs(x: Tensor) -> bool:
    """Return whether Triton kernels can read tensor x."""
    try:
        import triton
    except ImportError:
        return False
    return x.is_cuda or bool(triton.knobs.runtime.interpret and x.dtype != torch.bfloat16)
