"""One decoder layer in plain torch: start reading here.

`plain_decoder_layer` computes a layer of a dense Qwen3 or Llama model as one function, from top to bottom, without
fused kernels and without tensor parallelism. The engine does not call it: `minisgl.models.decoder` computes the same
with `minisgl.layers` and `minisgl.plugins.kernels.ops`. tests/models/test_plain.py runs both on the same inputs and
compares them. Where the parts are in the engine's code:

- projections: `minisgl.layers.linear`; attention as a layer: `minisgl.layers.attention`; MLP: `minisgl.layers.mlp`
- QK-norm, RoPE and KV store, as a method: `minisgl.attention.AttentionBackend.norm_rope_store`
- RMSNorm, fused with the addition of the residual: `minisgl.layers.norm`, `minisgl.plugins.kernels.ops.norm`
- attention over pages: a plugin behind the interface `minisgl.attention.AttentionBackend`
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.attention import AttentionBackend, LayerSpec
from minisgl.kvcache.pool import KVPool
from minisgl.layers.rope import frequencies
from minisgl.models.config import ModelConfig

__all__ = ["plain_decoder_layer"]


def plain_decoder_layer(
    weights: Mapping[str, Tensor],
    layer: LayerSpec,
    config: ModelConfig,
    x: Tensor,
    positions: Tensor,
    out_cache_loc: Tensor,
    pool: KVPool,
    attention: AttentionBackend,
) -> Tensor:
    """Compute one pre-norm decoder layer of Qwen3 or Llama type for the tokens of one step.

    A step's tokens come from several requests; they are concatenated, without padding. Only the attention backend
    distinguishes the requests: it must have been planned for the step (`AttentionBackend.plan`). This function stores
    the tokens' keys and values in ``pool``.

    Args:
        weights: The parameters of a `minisgl.models.decoder.DecoderLayer` at tensor-parallel size 1, by name, in the
            model's dtype.
        layer: The layer's number, head counts and head size; the attention backend also reads its scale and window.
        config: The model's configuration, of which RoPE parameters and ``rms_norm_eps`` are used.
        x: The residual stream [tokens, hidden], which is not changed.
        positions: Each token's position in its sequence [tokens].
        out_cache_loc: Each token's KV location [tokens]: page · page_size + offset within the page.
        pool: The KV pool of all layers.
        attention: The attention backend.

    Returns:
        The residual stream after the layer [tokens, hidden].
    """
    tokens, hidden = x.shape
    q_heads, kv_heads, head_dim = layer.q_heads, layer.kv_heads, layer.head_dim
    eps = config.rms_norm_eps

    # ---- attention ----
    # Norm before the projection (pre-norm). One matrix holds the query, key and value projections.
    h = F.rms_norm(x, (hidden,), weights["input_layernorm.weight"], eps)
    qkv = F.linear(h, weights["self_attn.qkv_proj.weight"], weights.get("self_attn.qkv_proj.bias"))
    # qkv: [tokens, (q_heads + 2·kv_heads)·head_dim]
    q, k, v = qkv.split([q_heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=-1)
    q = q.reshape(tokens, q_heads, head_dim)  # [tokens, q_heads·head_dim] → [tokens, q_heads, head_dim]
    k = k.reshape(tokens, kv_heads, head_dim)  # [tokens, kv_heads·head_dim] → [tokens, kv_heads, head_dim]
    v = v.reshape(tokens, kv_heads, head_dim)  # as for k

    # QK-norm: RMSNorm of each query and key head. Qwen3 has it, Llama does not.
    if "self_attn.q_norm.weight" in weights:
        q = F.rms_norm(q, (head_dim,), weights["self_attn.q_norm.weight"], eps)
        k = F.rms_norm(k, (head_dim,), weights["self_attn.k_norm.weight"], eps)

    # RoPE: rotate each pair of dimensions (i, i + head_dim/2) by an angle proportional to the token's position.
    inv_freq, rope_scale = frequencies(config.rope, head_dim)  # [head_dim/2], radians per position
    angles = positions.float()[:, None] * inv_freq.to(x.device)  # [tokens, head_dim/2]
    cos = (angles.cos() * rope_scale)[:, None, :]  # [tokens, 1, head_dim/2]: the same for all heads
    sin = (angles.sin() * rope_scale)[:, None, :]
    q1, q2 = q.float().chunk(2, dim=-1)  # each [tokens, q_heads, head_dim/2]
    k1, k2 = k.float().chunk(2, dim=-1)  # each [tokens, kv_heads, head_dim/2]
    q = torch.cat((q1 * cos - q2 * sin, q2 * cos + q1 * sin), dim=-1).to(x.dtype)  # [tokens, q_heads, head_dim]
    k = torch.cat((k1 * cos - k2 * sin, k2 * cos + k1 * sin), dim=-1).to(x.dtype)  # [tokens, kv_heads, head_dim]

    # Store keys and values in the pages of the requests, then attend: each query reads the KV of its own request at its
    # own and all earlier positions (within the layer's window, if it has one), also those that were stored in earlier
    # steps.
    pool.store(layer.index, k, v, out_cache_loc)
    attended = attention.forward(layer, q, torch.empty_like(q))  # [tokens, q_heads, head_dim]

    # Output projection, added to the residual stream.
    attended = attended.reshape(tokens, q_heads * head_dim)  # [tokens, q_heads, head_dim] → [tokens, q_heads·head_dim]
    x = x + F.linear(attended, weights["self_attn.o_proj.weight"], weights.get("self_attn.o_proj.bias"))

    # ---- MLP ----
    # Gated: down(silu(gate(h)) · up(h)). One matrix holds the gate and up projections.
    h = F.rms_norm(x, (hidden,), weights["post_attention_layernorm.weight"], eps)
    gate_up = F.linear(h, weights["mlp.gate_up_proj.weight"], weights.get("mlp.gate_up_proj.bias"))
    gate, up = gate_up.chunk(2, dim=-1)  # [tokens, 2·intermediate] → two of [tokens, intermediate]
    return x + F.linear(F.silu(gate) * up, weights["mlp.down_proj.weight"], weights.get("mlp.down_proj.bias"))
