"""Lab shard: A decoder block over ranks.

Grade it:  python -m minisgl.lab test shard     (`hint shard` for a hint)
Serve it:  python -m minisgl plugins=my_shard.py architecture=Mine
"""

# minisgl lab shard, skeleton 8b4bba0984 (minisgl 0.2.0)

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from minisgl.attention import LayerSpec
from minisgl.hooks import hookimpl
from minisgl.kernel.rope import QKNorm, norm_rope_store
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
    """Grouped-query attention over the pool's pages. Attributes with weights are named as in the checkpoint."""

    def __init__(self, index: int, config: ModelConfig, ctx: Context):
        # TODO shard.attention
        # 1. Whole heads go to a rank, each with its queries, keys and values: it attends without asking anyone.
        # 2. Cut by its inputs, which are this rank's heads: every rank has a part of the sum.
        # 3. q_norm and k_norm: norms of a head, which is whole on its rank, so every rank has the weights.
        # 4. What the pool and the backend see is the heads of this rank, not the model's.
        raise NotImplementedError

    def forward(self, x: Tensor, cos_sin: Tensor, out_cache_loc: Tensor) -> Tensor:
        """x [tokens, hidden], the same on every rank; cos_sin [tokens, head_dim]; where [tokens] → as x."""
        # TODO shard.attention
        # 5. Normalise and rotate queries and keys, and store KV: attention only reads it.
        # 6. The first all-reduce is in here.
        raise NotImplementedError


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, config: ModelConfig, ctx: Context):
        # TODO shard.mlp
        # 1. Gate and up are cut alike: what is multiplied element by element is on the same rank.
        # 2. Down takes just the inner elements that this rank has; the second all-reduce is in it.
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden], the same on every rank → as x."""
        # TODO shard.mlp
        raise NotImplementedError


class Block(nn.Module):
    """One layer: attention, then feed-forward, each on a norm of the residual stream and added to it."""

    def __init__(self, index: int, config: ModelConfig, ctx: Context):
        # TODO shard.block
        # 1. Under the checkpoint's names: input_layernorm, self_attn, post_attention_layernorm, mlp.
        raise NotImplementedError

    def forward(self, x: Tensor, residual: None, cos_sin: Tensor, out_cache_loc: Tensor) -> tuple[Tensor, None]:
        """x [tokens, hidden] is the whole residual stream, the same on every rank, before and after; ``residual`` is
        None, for blocks that leave sums to their successor."""
        # TODO shard.block
        # 2. Every rank has the whole stream, so it is added once, to what was summed over the ranks already.
        raise NotImplementedError


class Mine(Decoder):
    """Dense Qwen3; its checkpoints say Qwen3ForCausalLM."""

    def block(self, index: int) -> nn.Module:
        return Block(index, self.config, self.ctx)


@hookimpl
def minisgl_models() -> Mapping[str, type]:
    return {"Mine": Mine}
