"""The decoder that all architectures share: embed, then layers of attention and feed-forward, then the head.

An architecture is a subclass in a plugin that says what differs: which attention, which feed-forward. The residual
stream is carried beside the activations, so that add and norm (and the sum over ranks before them) are one call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor, nn

from minisgl.attention import LayerSpec
from minisgl.layers import (
    AttentionLayer,
    Context,
    GatedMLP,
    ParallelLMHead,
    RMSNormFused,
    RoPE,
    VocabParallelEmbedding,
)
from minisgl.layers.weight_shards import WeightShard, WeightSource, weight_shards_of
from minisgl.models.config import ModelConfig
from minisgl.models.weights import load_weights

__all__ = ["Decoder", "DecoderLayer", "Model"]


class Model(Protocol):
    """What an engine knows of a model, which is built as ``cls(config, ctx)`` and holds only this rank's weights."""

    def attention_layers(self) -> list[LayerSpec]:
        """One for each layer that stores KV, in the order of their indices."""

    def load(self, source: WeightSource) -> None:
        """Fill the weights. Raises ConfigError that names tensors which are missing, unknown or mis-shaped."""

    def forward(
        self, input_ids: Tensor, positions: Tensor, out_cache_loc: Tensor, logits_indices: Tensor | None = None
    ) -> Tensor:
        """tokens, positions, where [n] int32 or int64 → hidden [n, hidden]. ``out_cache_loc`` is page·page_size +
        offset of
        each token's KV; the attention backend has been planned for the same rows. ``rows`` int32 or int64 [m]: the
        tokens whose hidden states are wanted, [m, hidden]; all tokens' KV is stored nevertheless."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden], the rows that sample → [rows, vocab], the same on every rank."""


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward. Both return partial sums: the norm that follows reduces them."""

    def __init__(self, attention: AttentionLayer, mlp: nn.Module, config: ModelConfig, ctx: Context):
        super().__init__()
        self.input_layernorm = RMSNormFused(config.hidden_size, config.rms_norm_eps, ctx)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNormFused(config.hidden_size, config.rms_norm_eps, ctx)
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos_sin: Tensor,
        out_cache_loc: Tensor,
        logits_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x, residual [n, hidden] → both [n, hidden], or [m, hidden] of the tokens ``rows`` [m] only."""
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, cos_sin, out_cache_loc, logits_indices)
        if logits_indices is not None:
            residual = residual.index_select(0, logits_indices)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """A causal language model. Subclasses override `attention` and `mlp`, or the whole `block`."""

    def __init__(self, config: ModelConfig, ctx: Context):
        super().__init__()
        self.config, self.ctx = config, ctx
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, ctx)
        self.rope = RoPE(config.rope, config.head_dim, config.max_len, ctx.device)
        blocks = [self.block(i) for i in range(config.num_hidden_layers)]
        self.specs: list[LayerSpec] = [block.self_attn.spec for block in blocks]
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNormFused(config.hidden_size, config.rms_norm_eps, ctx)
        tied = self.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, ctx, tied=tied)

    def block(self, index: int) -> Any:
        """Layer ``index``: called as a `DecoderLayer` is, and its ``self_attn`` has a ``spec``."""
        return DecoderLayer(self.attention(index), self.mlp(index), self.config, self.ctx)

    def attention(self, index: int, **options: Any) -> AttentionLayer:
        """The attention of layer ``index``; ``options`` are AttentionLayer's, with ``attention_bias`` as default."""
        c = self.config
        options = {"qkv_bias": c.attention_bias, "out_bias": c.attention_bias, **options}
        heads = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        return AttentionLayer(index, c.hidden_size, *heads, self.ctx, **options)

    def mlp(self, index: int, **options: Any) -> nn.Module:
        """The feed-forward of layer ``index``: gated, and dense; ``options`` are GatedMLP's."""
        c = self.config
        return GatedMLP(c.hidden_size, c.intermediate_size, c.hidden_act, self.ctx, **options)

    def attention_layers(self) -> list[LayerSpec]:
        return list(self.specs)

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Everything but the head is named ``model.…`` in checkpoints."""
        for name, child in self.named_children():
            yield from weight_shards_of(child, f"{prefix}{'' if name == 'lm_head' else 'model.'}{name}.", names)

    def load(self, source: WeightSource) -> None:
        load_weights(self, source, tied={"lm_head.weight": "model.embed_tokens.weight"} if self.lm_head.tied else {})

    def forward(
        self, input_ids: Tensor, positions: Tensor, out_cache_loc: Tensor, logits_indices: Tensor | None = None
    ) -> Tensor:
        x = self.embed_tokens(input_ids)
        cos_sin, out_cache_loc = self.rope(positions), out_cache_loc.long()
        residual = None
        *layers, last = self.layers
        for layer in layers:
            x, residual = layer(x, residual, cos_sin, out_cache_loc)
        if logits_indices is None or not isinstance(last, DecoderLayer):
            x = self.norm(*last(x, residual, cos_sin, out_cache_loc))[0]
            return x if logits_indices is None else x.index_select(0, logits_indices)
        # Of what follows the last layer's attention nobody reads more than these rows: of a prompt, one token.
        return self.norm(*last(x, residual, cos_sin, out_cache_loc, logits_indices))[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)
