"""Lab shard: A decoder block over ranks.

Grade it:  python -m minisgl.lab test shard     (`hint shard` for a hint)
Serve it:  python -m minisgl tp=2 plugins=my_shard.py architecture=Mine
"""

# minisgl lab shard, skeleton e16c83996a (minisgl 0.2.0)

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from minisgl.attention import LayerSpec, QKNorm
from minisgl.hooks import hookimpl
from minisgl.layers import (
    Context,
    LinearColParallelMerged,
    LinearQKVMerged,
    LinearRowParallel,
    RMSNorm,
    silu_and_mul,
)
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder


class Attention(nn.Module):
    """Grouped-query attention over the pages of the KV pool. Attributes with weights have the checkpoint's names."""

    def __init__(self, index: int, config: ModelConfig, ctx: Context):
        # TODO shard.attention
        # 1. A rank gets whole heads, with their queries, keys and values, so attention needs no communication.
        # 2. Split by its inputs, which are this rank's heads: every rank computes a partial sum.
        # 3. q_norm and k_norm normalise one head at a time: their ``dim`` is head_dim. Every rank has whole heads and
        #    all weights of both norms.
        # 4. The KV pool and the attention backend count the heads of this rank, not those of the whole model. The scale
        #    is head_dim ** -0.5, and the sliding window of the layer is `config.window(index)`.
        raise NotImplementedError

    def forward(self, x: Tensor, cos_sin: Tensor, out_cache_loc: Tensor) -> Tensor:
        """Compute attention of x [tokens, hidden]; x and the result are the same on every rank.

        cos_sin is [tokens, head_dim] float32; out_cache_loc [tokens] is each token's KV location.
        """
        # TODO shard.attention
        # 5. Normalise and rotate queries and keys, and store keys and values, before attention reads them.
        # 6. o_proj includes the first all-reduce of the layer.
        raise NotImplementedError


class MLP(nn.Module):
    """The gated MLP: down(silu(gate(x)) · up(x))."""

    def __init__(self, config: ModelConfig, ctx: Context):
        # TODO shard.mlp
        # 1. Gate and up are split alike, so that elements which are multiplied with each other are on the same rank.
        # 2. The inputs of down are the inner elements of this rank; down includes the second all-reduce of the layer.
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Compute the MLP of x [tokens, hidden]; x and the result are the same on every rank."""
        # TODO shard.mlp
        raise NotImplementedError


class Block(nn.Module):
    """One decoder layer: attention, then MLP. Each reads the normalised residual stream; its output is added."""

    def __init__(self, index: int, config: ModelConfig, ctx: Context):
        # TODO shard.block
        # 1. The attributes have the checkpoint's names: input_layernorm, self_attn, post_attention_layernorm, mlp.
        raise NotImplementedError

    def forward(self, x: Tensor, residual: None, cos_sin: Tensor, out_cache_loc: Tensor) -> tuple[Tensor, None]:
        """Compute the layer; x [tokens, hidden] is the residual stream, the same on every rank before and after.

        ``residual`` is always None: only layers that leave the addition to the next layer's norm use it. x may be
        overwritten.
        """
        # TODO shard.block
        # 2. Every rank holds the residual stream. So it is added after the all-reduce: added before, it would be
        #    counted once for every rank.
        raise NotImplementedError


class Mine(Decoder):
    """Dense Qwen3. Its checkpoints name Qwen3ForCausalLM; the option ``architecture`` selects this class instead."""

    model_type = "qwen3"
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
    }

    def block(self, index: int) -> nn.Module:
        """Build layer ``index``."""
        return Block(index, self.config, self.ctx)


@hookimpl
def minisgl_models() -> Mapping[str, type]:
    """Register the architecture."""
    return {"Mine": Mine}
