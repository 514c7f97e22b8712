"""The decoder layers for a few decode rows on a GPU: five launches a layer, and one that merges splits of the KV.

`DecoderLayer.forward` shows a layer operation by operation, for any number of tokens and ranks, and is the reference.
The function `forward` of this module computes all layers with the kernels of
`minisgl.plugins.kernels.ops.triton.decode_layer`, which fuse each projection with what precedes and follows it.
`serves` decides, in one place, which of the two runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from minisgl.layers.attention import AttentionLayer
from minisgl.models.decoder import DecoderLayer
from minisgl.plugins.kernels.attention import fuses as backend_fuses
from minisgl.plugins.kernels.converted.layers import (
    FastColParallelMerged,
    FastMLP,
    FastNormFused,
    FastQKVMerged,
    FastRouting,
    FastRowParallel,
)
from minisgl.plugins.kernels.ops.activation import ACTS
from minisgl.plugins.kernels.ops.launch import in_pieces


@runtime_checkable
class RoutedDecode(Protocol):
    """An optional ability of a backend: a few rows' norm, routing and experts in one call, with few launches."""

    def serves_routed(self, weights: Any, x: Tensor) -> bool:
        """Return whether `forward_routed` can compute x [rows, hidden] with these experts."""
        ...

    def forward_routed(
        self, weights: Any, x: Tensor, norm_weight: Tensor, eps: float, logits: Tensor, top_k: int, renormalize: bool
    ) -> Tensor:
        """Return x + the weighted sum of the outputs of each row's experts for the RMSNorm of x, [rows, hidden].

        x is the residual stream [rows, hidden]. The ``top_k`` experts and their weights follow from the router's
        ``logits`` [rows, experts], as `minisgl.plugins.models.experts.MoELayer` describes.
        """
        ...


MAX_ROWS = 4
"""The most rows for which `forward` was faster than the layers' own code on an H200: see docs/benchmarks/h200.md."""


def serves(layers: Iterable[Any], x: Tensor) -> bool:
    """Return whether `forward` can compute ``layers`` of x [rows, hidden].

    The layers must be exactly of the class `DecoderLayer`. There must be one GPU, at most `MAX_ROWS` rows, and an
    attention backend that computes them from the result of the QKV projection.
    """
    if not x.is_cuda or len(x) > MAX_ROWS or in_pieces():
        return False
    return all(type(layer) is DecoderLayer and _serves_layer(layer, x) and fuses(layer, x) for layer in layers)


def fuses(layer: Any, x: Tensor) -> bool:
    """Return whether the attention of x [rows, hidden] in this layer takes two launches: the second merges splits."""
    return backend_fuses(layer.self_attn.ctx.attention, layer.self_attn.spec, x)


def _serves_layer(layer: Any, x: Tensor) -> bool:
    """Return whether the kernels support the weights of this layer, on one rank."""
    from minisgl.plugins.kernels.ops.triton.decode_layer import serves as serves_weight

    if not is_usual(layer):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    weights = [attention.qkv_proj.weight, attention.o_proj.weight]
    if type(mlp) is FastMLP:
        weights += [mlp.gate_up_proj.weight, mlp.down_proj.weight]
    elif isinstance(mlp, FastRouting) and isinstance(mlp.moe, RoutedDecode) and mlp.moe.serves_routed(mlp.experts, x):
        weights.append(mlp.gate)
    else:
        return False
    return all(serves_weight(x.dtype, weight) for weight in weights)


def is_usual(layer: Any) -> bool:
    """Return whether a `DecoderLayer` has minisgl's own attention, and converted norms and projections, on one rank.

    A plugin may replace any of them by a module that computes something else, and then the layer must call it.
    """
    attention, mlp, norms = layer.self_attn, layer.mlp, (layer.input_layernorm, layer.post_attention_layernorm)
    if type(attention) is not AttentionLayer or any(type(norm) is not FastNormFused for norm in norms):
        return False
    if any(norm.comm is not None for norm in norms):
        return False
    own: list[tuple[Any, type]] = [(attention.qkv_proj, FastQKVMerged), (attention.o_proj, FastRowParallel)]
    if type(mlp) is FastMLP:
        own += [(mlp.gate_up_proj, FastColParallelMerged), (mlp.down_proj, FastRowParallel)]
    return all(type(module) is kind for module, kind in own)


def forward(layers: Iterable[Any], x: Tensor, cos_sin: Tensor, out_cache_loc: Tensor) -> Tensor:
    """Compute all ``layers`` of x [rows, hidden], the embedded tokens; returns the residual stream [rows, hidden].

    The attention backend must have been planned for these rows. cos_sin is [rows, head_dim] float32, and out_cache_loc
    [rows].
    """
    for layer in layers:
        x = _attention(layer, x, cos_sin, out_cache_loc)
        x = _mlp(layer, x)
    return x


def _attention(layer: DecoderLayer, x: Tensor, cos_sin: Tensor, out_cache_loc: Tensor) -> Tensor:
    """Return x + the layer's attention of the residual stream x: the launches 1 to 4."""
    from minisgl.plugins.kernels.ops.triton.decode_layer import projection

    attention, norm = layer.self_attn, layer.input_layernorm
    qkv_proj, o_proj = attention.qkv_proj, attention.o_proj
    qkv = projection(x, qkv_proj.weight, qkv_proj.bias, norm.weight, norm.eps)
    return projection(attention.attend(qkv, cos_sin, out_cache_loc), o_proj.weight, o_proj.bias, residual=x)


def _mlp(layer: DecoderLayer, x: Tensor) -> Tensor:
    """Return x + the layer's MLP of the residual stream x: the last two launches, or three with experts."""
    from minisgl.plugins.kernels.ops.triton.decode_layer import projection

    mlp: Any = layer.mlp
    norm = layer.post_attention_layernorm
    if isinstance(mlp, FastRouting):
        assert isinstance(mlp.moe, RoutedDecode)
        logits = projection(x, mlp.gate, None, norm.weight, norm.eps)
        return mlp.moe.forward_routed(mlp.experts, x, norm.weight, norm.eps, logits, mlp.top_k, mlp.renormalize)
    gate_up, down = mlp.gate_up_proj, mlp.down_proj
    inner = projection(x, gate_up.weight, gate_up.bias, norm.weight, norm.eps, act=ACTS[mlp.act_name])
    return projection(inner, down.weight, down.bias, residual=x)
