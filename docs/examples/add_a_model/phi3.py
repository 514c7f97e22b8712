"""Phi-3 and Phi-4: fused tensors in the checkpoint, and heads that are rotated in part. Microsoft, 2024 and 2025."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from minisgl.hooks import hookimpl
from minisgl.layers import AttentionLayer, RoPE
from minisgl.layers.weight_shards import WeightShard
from minisgl.models.decoder import Decoder


class PartlyRotated(AttentionLayer):
    """Attention that rotates the first dimensions of each head."""

    def attend(self, qkv: Tensor, cos_sin: Tensor, out_cache_loc: Tensor) -> Tensor:
        """cos_sin is [tokens, rotated dimensions]."""
        dim, rotated = self.spec.head_dim, cos_sin.shape[-1]
        qk_heads = self.spec.q_heads + self.spec.kv_heads
        heads = qkv.view(len(qkv), -1, dim)
        x, y = heads[:, :qk_heads, :rotated].float().chunk(2, dim=-1)
        cos, sin = cos_sin[:, None].chunk(2, dim=-1)  # [tokens, 1, rotated / 2]
        turned = torch.cat((x * cos - y * sin, y * cos + x * sin), dim=-1).to(qkv.dtype)
        heads = torch.cat((torch.cat((turned, heads[:, :qk_heads, rotated:]), dim=-1), heads[:, qk_heads:]), dim=1)
        unchanged = cos_sin.new_zeros(len(qkv), dim)  # cosines 1, sines 0: the layer itself rotates by nothing
        unchanged[:, : dim // 2] = 1
        return super().attend(heads.flatten(1), unchanged, out_cache_loc)


class Phi3ForCausalLM(Decoder):
    """Llama with fused tensors; Phi-4-mini also rotates only three quarters of each head."""

    model_type = "phi3"

    def rotary_embedding(self) -> nn.Module:
        c = self.config
        rotated = int(c.head_dim * c.rope.partial_rotary_factor)
        return RoPE(replace(c.rope, partial_rotary_factor=1.0), rotated, c.max_len, self.ctx.device)

    def attention(self, index: int, **options: Any) -> AttentionLayer:
        c = self.config
        heads = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        return PartlyRotated(index, c.hidden_size, *heads, self.ctx, window=c.sliding_window or -1, **options)

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Read the rows of each projection from the fused tensor that stacks them."""
        c = self.config
        q, kv, inner = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim, c.intermediate_size
        fused = {  # projection → the fused tensor, its first row there, and the rows of the fused tensor
            "q_proj": ("qkv_proj", 0, q + 2 * kv),
            "k_proj": ("qkv_proj", q, q + 2 * kv),
            "v_proj": ("qkv_proj", q + kv, q + 2 * kv),
            "gate_proj": ("gate_up_proj", 0, 2 * inner),
            "up_proj": ("gate_up_proj", inner, 2 * inner),
        }
        for shard in super().weight_shards(prefix, names):
            *parent, part, kind = shard.name.split(".")
            if part in fused:
                name, first, total = fused[part]
                rows, columns = shard.index
                index = (slice(first + rows.start, first + rows.stop), columns)
                name, shape = ".".join([*parent, name, kind]), (total, shard.shape[1])
                yield replace(shard, name=name, shape=shape, index=index)
            else:
                yield shard


@hookimpl
def minisgl_models() -> Mapping[str, type]:
    return {"Phi3ForCausalLM": Phi3ForCausalLM}
