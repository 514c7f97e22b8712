"""The decoder that all architectures share: embedding, decoder layers, final norm, LM head.

Start reading with `DecoderLayer`. From there a layer leads to `AttentionLayer` (`layers/attention.py`), to `attend` of
the backend (`attention/__init__.py`), and to `GatedMLP` (`layers/linear.py`). An architecture is a subclass of
`Decoder` in a plugin, which overrides what differs: the attention or the MLP. Layers pass the residual stream and the
latest layer output as two tensors. So the addition, the norm and the all-reduce before them are one call, which can be
one launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

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

if TYPE_CHECKING:
    from minisgl.config import Config
    from minisgl.plugin_manager.manager import PluginManager

__all__ = ["Decoder", "DecoderLayer", "DecoderLayers", "Model"]


class Model(Protocol):
    """The interface between the engine and a model.

    The engine builds a model as ``cls(config, ctx)``. The model holds only this rank's weights.
    """

    def attention_layers(self) -> list[LayerSpec]:
        """Return the `LayerSpec` of each layer that stores KV, in the order of the layers' indices."""

    def allocate_states(self, config: Config, manager: PluginManager) -> list[Tensor]:
        """Allocate the recurrent states of all request-pool rows, for `Context.states`: docs/design/states.md.

        The method may be missing: the model has no state then. Raises `ConfigError` for options that exclude states.
        """

    def load(self, source: WeightSource) -> None:
        """Load the weights. Raises ConfigError that names tensors which are missing, unknown or of a wrong shape."""

    def forward(
        self, input_ids: Tensor, positions: Tensor, out_cache_loc: Tensor, logits_indices: Tensor | None = None
    ) -> Tensor:
        """Compute the final hidden states [n, hidden] of a step's n tokens, and store the tokens' KV.

        input_ids, positions and out_cache_loc are [n], int32 or int64. ``out_cache_loc`` is page·page_size + offset of
        each token's KV. The attention backend must have been planned for the same step. With ``logits_indices`` [m],
        int32 or int64, only these tokens' hidden states are returned, [m, hidden]; the KV of all tokens is stored.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [rows, vocab] of the hidden states [rows, hidden], the same on every rank."""


class DecoderLayer(nn.Module):
    """Attention and MLP, each after an RMSNorm (pre-norm).

    Attention and MLP return partial sums, which the following `RMSNormFused` all-reduces over the ranks.
    """

    def __init__(self, attention: AttentionLayer, mlp: nn.Module, config: ModelConfig, ctx: Context):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNormFused(size, eps, ctx)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNormFused(size, eps, ctx)
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos_sin: Tensor,
        out_cache_loc: Tensor,
        logits_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the layer; returns the MLP's partial sum and the residual stream, to be added by the next norm.

        x and residual are [n, hidden]: the preceding layer's partial sum and the residual stream (None in the first
        layer). cos_sin is [n, head_dim] float32 and out_cache_loc [n]. Both results are [n, hidden], or [m, hidden] for
        the tokens ``logits_indices`` [m] only.
        """
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, cos_sin, out_cache_loc, logits_indices)
        if logits_indices is not None:
            residual = residual.index_select(0, logits_indices)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class DecoderLayers(nn.ModuleList):
    """The layers of a decoder, one after another: a class, so that a converter can give it another `forward`."""

    def forward(
        self, x: Tensor, cos_sin: Tensor, out_cache_loc: Tensor, logits_indices: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute all layers of the embedded tokens x [n, hidden]; see `DecoderLayer.forward` for the other arguments.

        Returns the last layer's partial sum and the residual stream, [n, hidden] or, with ``logits_indices`` [m], [m,
        hidden].
        """
        residual: Tensor | None = None
        *layers, last = self
        for layer in layers:
            x, residual = layer(x, residual, cos_sin, out_cache_loc)
        if logits_indices is None:
            return last(x, residual, cos_sin, out_cache_loc)  # type: ignore[no-any-return]
        if isinstance(last, DecoderLayer):  # past its attention only these rows are needed, so it computes no others
            return last(x, residual, cos_sin, out_cache_loc, logits_indices)  # type: ignore[no-any-return]
        x, residual = last(x, residual, cos_sin, out_cache_loc)
        x = x.index_select(0, logits_indices)
        residual = None if residual is None else residual.index_select(0, logits_indices)
        return x, residual


class Decoder(nn.Module):
    """A causal language model. Subclasses override `attention` or `mlp`, or the whole layer with `block`.

    Raises `ConfigError` if the model can't be computed as config.json describes it.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    """Fields of config.json that may be missing, and their values: those of the architecture's class in transformers.

    `ModelConfig` has other defaults, or none. The attribute ``config`` has these, not the argument of the constructor.
    """
    model_type: ClassVar[str | None] = None
    """The ``model_type`` of config.json that this class computes. A subclass does not inherit it.

    If it is set, config.json must not name another type, and must not have fields that other architectures compute and
    this one does not: `plugins/models/foreign_fields.py` checks that. ``defaults`` names the fields that it computes
    beside those of `ModelConfig`. None: the class itself checks config.json.
    """

    def __init__(self, config: ModelConfig, ctx: Context):
        super().__init__()
        self.ctx = ctx
        self.config = config = config.with_defaults(self.defaults)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, ctx)
        self.rope = self.rotary_embedding()
        blocks = [self.block(i) for i in range(config.num_hidden_layers)]
        self.specs: list[LayerSpec] = [block.self_attn.spec for block in blocks if hasattr(block, "self_attn")]
        self.layers = DecoderLayers(blocks)
        self.norm = RMSNormFused(config.hidden_size, config.rms_norm_eps, ctx)
        tied = self.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, ctx, tied=tied)

    def rotary_embedding(self) -> nn.Module:
        """Build the module that maps positions [n] to ``cos_sin``, which every layer gets.

        By default, ``cos_sin`` is [n, head_dim] float32: cosines, then sines. A plugin may return another layout if the
        `attend` of its attention passes `AttentionLayer.attend` this one.
        """
        return RoPE(self.config.rope, self.config.head_dim, self.config.max_len, self.ctx.device)

    def block(self, index: int) -> Any:
        """Build layer ``index``.

        The layer must be callable with the arguments of `DecoderLayer.forward` (``logits_indices`` only if it is a
        `DecoderLayer`), and its ``self_attn``, if it has one, must have a `LayerSpec` as attribute ``spec``.
        """
        return DecoderLayer(self.attention(index), self.mlp(index), self.config, self.ctx)

    def attention(self, index: int, **options: Any) -> AttentionLayer:
        """Build the attention of layer ``index``.

        ``options`` are keyword arguments of `AttentionLayer`; by default the biases follow ``attention_bias`` of the
        configuration.
        """
        c = self.config
        options = {"qkv_bias": c.attention_bias, "out_bias": c.attention_bias, **options}
        heads = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        return AttentionLayer(index, c.hidden_size, *heads, self.ctx, **options)

    def mlp(self, index: int, **options: Any) -> nn.Module:
        """Build the MLP of layer ``index``: gated and dense. ``options`` are keyword arguments of `GatedMLP`."""
        c = self.config
        return GatedMLP(c.hidden_size, c.intermediate_size, c.hidden_act, self.ctx, **options)

    def attention_layers(self) -> list[LayerSpec]:
        """Return the `LayerSpec` of every layer with attention, in order."""
        return list(self.specs)

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Yield the shards of all weights. In checkpoints, every name but the LM head's begins with `_base`."""
        for name, child in self.named_children():
            base = "" if name == "lm_head" else _base(names)
            yield from weight_shards_of(child, f"{prefix}{base}{name}.", names)

    def load(self, source: WeightSource) -> None:
        """Load all weights from ``source``: see `Model.load`."""
        embedding = f"{_base(source.names)}embed_tokens.weight"
        load_weights(self, source, tied={"lm_head.weight": embedding} if self.lm_head.tied else {})

    def forward(
        self, input_ids: Tensor, positions: Tensor, out_cache_loc: Tensor, logits_indices: Tensor | None = None
    ) -> Tensor:
        """Compute the final hidden states: see `Model.forward`."""
        x, cos_sin = self.embed_tokens(input_ids), self.rope(positions)
        hidden: Tensor = self.norm(*self.layers(x, cos_sin, out_cache_loc.long(), logits_indices))[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits: see `Model.logits`."""
        logits: Tensor = self.lm_head(hidden)
        return logits


def _base(names: frozenset[str] | None) -> str:
    """Return what precedes the names of tensors in a checkpoint with ``names``: nothing if a base model was saved."""
    embedding = "embed_tokens.weight"
    saved_base = names is not None and embedding in names and f"model.{embedding}" not in names
    return "" if saved_base else "model."
