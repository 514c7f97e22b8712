"""Gemma 2: norms before and after each sub-layer, capped scores, a window in every other layer. Gemma Team, 2024."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.hooks import hookimpl
from minisgl.layers import AttentionLayer, Context, ParallelLMHead, RMSNorm, VocabParallelEmbedding
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder


class GemmaNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + weight, in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, 1 + self.weight.float(), self.eps).to(x.dtype)


class FinalNorm(GemmaNorm):
    """The norm before the head. `Decoder` calls it with a residual, which is None here, and takes the first result."""

    def forward(self, x: Tensor, residual: None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), x


class ScaledEmbedding(VocabParallelEmbedding):
    """Token embeddings times the square root of the hidden size, which is rounded to the model's dtype."""

    def __init__(self, vocab_size: int, hidden_size: int, ctx: Context):
        super().__init__(vocab_size, hidden_size, ctx)
        self.scale = float(torch.tensor(hidden_size**0.5, dtype=ctx.dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.scale


class Gemma2Layer(nn.Module):
    """One layer. Attributes with weights have the checkpoint's names."""

    def __init__(self, attention: AttentionLayer, mlp: nn.Module, config: ModelConfig, ctx: Context):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.comm = ctx.comm
        self.input_layernorm = GemmaNorm(size, eps, ctx)
        self.self_attn = attention
        self.post_attention_layernorm = GemmaNorm(size, eps, ctx)
        self.pre_feedforward_layernorm = GemmaNorm(size, eps, ctx)
        self.mlp = mlp
        self.post_feedforward_layernorm = GemmaNorm(size, eps, ctx)

    def forward(self, x: Tensor, residual: None, cos_sin: Tensor, out_cache_loc: Tensor) -> tuple[Tensor, None]:
        """x [tokens, hidden] is the whole residual stream, before and after the layer; ``residual`` stays None."""
        # Attention and MLP return this rank's partial sum. A norm needs the whole sum: all_reduce adds the parts.
        y = self.self_attn(self.input_layernorm(x), cos_sin, out_cache_loc)
        x = x + self.post_attention_layernorm(self.comm.all_reduce(y))
        y = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(self.comm.all_reduce(y)), None


class Gemma2ForCausalLM(Decoder):
    """`Decoder` with Gemma 2's layers, embedding, final norm and capped logits."""

    def __init__(self, config: ModelConfig, ctx: Context):
        raw = config.raw
        # Published config.json files leave out what transformers' Gemma2Config has as its default.
        tied, act = raw.get("tie_word_embeddings", True), raw.get("hidden_activation", "gelu_pytorch_tanh")
        super().__init__(replace(config, tie_word_embeddings=tied, hidden_act=act), ctx)
        sizes = (config.vocab_size, config.hidden_size)
        self.embed_tokens = ScaledEmbedding(*sizes, ctx)
        self.norm = FinalNorm(config.hidden_size, config.rms_norm_eps, ctx)  # type: ignore[assignment]
        self.lm_head = ParallelLMHead(*sizes, ctx, tied=self.embed_tokens if tied else None)

    def block(self, index: int) -> nn.Module:
        return Gemma2Layer(self.attention(index), self.mlp(index), self.config, self.ctx)

    def attention(self, index: int, **options: Any) -> AttentionLayer:
        raw = self.config.raw
        types = raw.get("layer_types")
        local = types[index] == "sliding_attention" if types else index % 2 == 0
        return super().attention(
            index,
            scale=self.config.need("query_pre_attn_scalar") ** -0.5,
            soft_cap=raw.get("attn_logit_softcapping") or 0.0,
            window=self.config.sliding_window if local and self.config.sliding_window else -1,
            **options,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        logits, cap = super().logits(hidden), self.config.raw.get("final_logit_softcapping")
        return logits if cap is None else cap * torch.tanh(logits / cap)


@hookimpl
def minisgl_models() -> Mapping[str, type]:
    return {"Gemma2ForCausalLM": Gemma2ForCausalLM}
