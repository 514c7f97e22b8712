"""The decoder layers for up to 256 rows on a GPU, with norms, additions and activations as parts of the products.

`DecoderLayer.forward` shows a layer operation by operation, and is the reference. The function `forward` of this module
computes all layers with seven launches for each layer instead of ten: QKV projection; QK-norm, RoPE and KV store;
attention; the merge of its splits; output projection; gate, up and activation; down projection. `serves` decides
which of the two runs. `few_rows` has still fewer launches, for at most four rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from minisgl.models.decoder import DecoderLayer
from minisgl.plugins.kernels.converted.few_rows import is_usual
from minisgl.plugins.kernels.converted.layers import FastMLP
from minisgl.plugins.kernels.ops.activation import ACTS
from minisgl.plugins.kernels.ops.fused_linear import ResidualStream
from minisgl.plugins.kernels.ops.norm import rms_norm

MIN_ROWS = 2
"""The fewest rows that `forward` computes. `minisgl.plugins.kernels.ops.linear` multiplies one row faster."""


def serves(layers: Iterable[Any], x: Tensor) -> bool:
    """Return whether `forward` can compute ``layers`` of x [rows, hidden].

    The layers must be exactly of the class `DecoderLayer`, and have no experts. There must be one rank, a Hopper GPU,
    `MIN_ROWS` to 256 rows, and weights that the kernels support.
    """
    if not x.is_cuda or len(x) < MIN_ROWS:
        return False
    from minisgl.plugins.kernels.ops.triton.device import is_hopper
    from minisgl.plugins.kernels.ops.triton.fused_linear import MAX_ROWS

    if len(x) > MAX_ROWS or not is_hopper(x.device):
        return False
    return all(type(layer) is DecoderLayer and _serves_layer(layer, x) for layer in layers)


def _serves_layer(layer: Any, x: Tensor) -> bool:
    """Return whether the kernels support the weights of this layer, on one rank."""
    from minisgl.plugins.kernels.ops.triton.fused_linear import serves as serves_weight

    if not is_usual(layer) or type(layer.mlp) is not FastMLP:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    products = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    return all(serves_weight(x.dtype, product.weight) for product in products)


def forward(layers: Iterable[Any], x: Tensor, cos_sin: Tensor, out_cache_loc: Tensor) -> Tensor:
    """Compute all ``layers`` of x [rows, hidden], the embedded tokens; returns the residual stream [rows, hidden].

    The attention backend must have been planned for these rows. cos_sin is [rows, head_dim] float32, and out_cache_loc
    [rows].
    """
    from minisgl.plugins.kernels.ops.triton.fused_linear import add_linear, normed_linear

    layers = list(layers)
    norms = [layer.input_layernorm for layer in layers]
    stream = ResidualStream(x, rms_norm(x, norms[0].weight, norms[0].eps), None)
    for layer, norm, next_norm in zip(layers, norms, [*norms[1:], None], strict=True):
        attention, mlp, mlp_norm = layer.self_attn, layer.mlp, layer.post_attention_layernorm
        qkv_proj, o_proj = attention.qkv_proj, attention.o_proj
        qkv = normed_linear(stream.scaled, stream.squares, norm.eps, qkv_proj.weight, qkv_proj.bias)
        heads = attention.attend(qkv, cos_sin, out_cache_loc)
        stream = add_linear(heads, o_proj.weight, o_proj.bias, stream.x, mlp_norm.weight)
        gate_up, down = mlp.gate_up_proj, mlp.down_proj
        inner = normed_linear(
            stream.scaled, stream.squares, mlp_norm.eps, gate_up.weight, gate_up.bias, ACTS[mlp.act_name]
        )
        next_weight = None if next_norm is None else next_norm.weight
        stream = add_linear(inner, down.weight, down.bias, stream.x, next_weight)
    return stream.x
