"""The decoder layers for few tokens on a CPU: one call of C++ computes all of them.

`DecoderLayer.forward` shows a layer operation by operation, for any number of tokens and ranks, and is the reference:
the call computes the same operations in the same order, with the same results bit by bit. `serves` decides which of the
two runs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from minisgl.layers.attention import AttentionLayer
from minisgl.models.decoder import DecoderLayer, DecoderLayers
from minisgl.plugins.kernels.attention import planned_in_cpp
from minisgl.plugins.kernels.ops.cpp import decoder_layers as cpp
from minisgl.plugins.kernels.ops.launch import in_recording

__all__ = ["CpuDecoderLayers"]


class CpuDecoderLayers(DecoderLayers):
    """`DecoderLayers` that computes steps of few tokens in one call, if no plugin replaced a part of a layer."""

    pool: Any = None
    """The KV pool for which ``product`` was made."""
    product: cpp.Product | None = None
    """All layers, or None if they can't be computed in one call."""

    def forward(
        self, x: Tensor, cos_sin: Tensor, out_cache_loc: Tensor, logits_indices: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute all layers: see `DecoderLayers.forward`."""
        if logits_indices is None and self.serves(x):
            assert self.product is not None
            first: Any = self[0]
            return cpp.forward(self.product.function, x, cos_sin, out_cache_loc, first.self_attn.ctx.attention)
        return super().forward(x, cos_sin, out_cache_loc, logits_indices)

    def serves(self, x: Tensor) -> bool:
        """Return whether the step can be computed in one call. The first time, prepare it.

        A recorded step consists of the layers' own operations, which `graph=simulated` checks.
        """
        if len(x) > cpp.MAX_TOKENS or not x.is_contiguous() or in_recording():
            return False
        ctx = getattr(getattr(self[0], "self_attn", None), "ctx", None)
        if ctx is None or planned_in_cpp(ctx.attention) is None:
            return False
        if self.pool is not ctx.pool:
            layers: list[Any] = list(self)
            self.pool = ctx.pool
            usual = ctx.pool.dtype == x.dtype and all(_is_usual(layer, x) for layer in layers)
            uniform = usual and len({_sizes(layer) for layer in layers}) == 1
            self.product = cpp.make(layers, ctx.pool) if uniform else None
        return self.product is not None and len(x) <= self.product.max_tokens


def _sizes(layer: DecoderLayer) -> tuple[int, ...]:
    """Return the sizes that all layers must have in common."""
    spec = layer.self_attn.spec
    return spec.q_heads, spec.kv_heads, spec.head_dim, cpp.inner_size(layer)


def _is_usual(layer: Any, x: Tensor) -> bool:
    """Return whether all parts of the layer are converted ones of the core, on one rank, with the dtype of x."""
    if type(layer) is not DecoderLayer or type(layer.mlp) not in cpp.PARTS or layer.mlp.act_name != "silu":
        return False
    attention, norms = layer.self_attn, (layer.input_layernorm, layer.post_attention_layernorm)
    if type(attention) is not AttentionLayer or any(type(norm) not in cpp.PARTS for norm in norms):
        return False
    heads = () if attention.norm is None else (attention.norm.q, attention.norm.k)
    if any(weight.dtype != x.dtype for weight in (*heads, *(norm.weight for norm in norms))):
        return False
    modules = (attention.qkv_proj, attention.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)
    if any(type(module) not in cpp.PRODUCTS for module in modules):
        return False
    return bool(attention.ctx.comm.size == 1)
