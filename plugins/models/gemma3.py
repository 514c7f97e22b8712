"""Gemma 3: five layers with a window to one without, each type with its own RoPE. Gemma Team, Gemma 3, 2025.

The text part of the multimodal checkpoints (4B and larger) is served, without their vision tower.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.hooks import hookimpl
from minisgl.layers import AttentionLayer, Context, RMSNorm, RMSNormFused, VocabParallelEmbedding
from minisgl.layers.weight_shards import WeightSource
from minisgl.models.config import ModelConfig
from minisgl.models.converter import convert
from minisgl.models.decoder import Decoder
from minisgl.plugins.models.layer_types import RoPEByLayerType, TypedAttention
from minisgl.plugins.models.multimodal import TextPart, text_config

MULTIMODAL = "Gemma3ForConditionalGeneration"
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
}
"""Those of Gemma3TextConfig in transformers."""


@hookimpl
def minisgl_read_config(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return config.json of a Gemma 3 model, with the text part of a multimodal one at the top level."""
    architectures = raw.get("architectures")
    if architectures == [MULTIMODAL]:
        raw = text_config(raw, MULTIMODAL, tied=True)
    elif architectures != ["Gemma3ForCausalLM"]:
        return None
    fields = {**_DEFAULTS, **raw}
    ropes = fields.pop("rope_parameters", None) or {}
    given: dict[str, Any] = {kind: dict(ropes.get(kind) or {}) for kind in ("full_attention", "sliding_attention")}
    given["full_attention"].update(fields.pop("rope_scaling", None) or {})
    given["full_attention"].setdefault("rope_theta", fields.pop("rope_theta", 1_000_000.0))
    given["sliding_attention"].setdefault("rope_theta", fields.pop("rope_local_base_freq", 10_000.0))
    fields.pop("rope_theta", None)
    return {**fields, "rope_parameters": given, "hidden_act": fields["hidden_activation"]}


class GemmaNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + weight, in float32."""

    zero_centred: ClassVar[bool] = True
    """Kernels may replace this class: `minisgl.plugins.kernels.converted.layers.FastZeroCentredNorm`."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., dim]; returns a tensor of the same shape and dtype."""
        return F.rms_norm(x.float(), self.weight.shape, 1 + self.weight.float(), self.eps).to(x.dtype)


class FinalNorm(RMSNormFused):
    """The norm before the LM head. `Decoder` passes it a residual, which is None here, and takes the first result."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return (norm(x), x) of x [tokens, dim]."""
        return GemmaNorm.forward(self, x), x  # type: ignore[arg-type]


class ScaledEmbedding(VocabParallelEmbedding):
    """Token embeddings times the square root of the hidden size, which is rounded to the model's dtype."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up tokens [n]; returns [n, hidden]."""
        scale = float(torch.tensor(self.weight.shape[1] ** 0.5, dtype=self.weight.dtype))
        return super().forward(tokens) * scale


class GemmaAttention(TypedAttention):
    """Attention with a `GemmaNorm` of each query and key head."""

    def __init__(self, index: int, hidden_size: int, *heads: Any, eps: float, **options: Any):
        super().__init__(index, hidden_size, *heads, **options)
        *_, dim, ctx = heads
        self.q_norm, self.k_norm = GemmaNorm(dim, eps, ctx), GemmaNorm(dim, eps, ctx)

    def attend(self, qkv: Tensor, cos_sin: Tensor, out_cache_loc: Tensor) -> Tensor:
        """Normalise queries and keys, then compute `TypedAttention.attend`."""
        shape = (len(qkv), -1, self.spec.head_dim)
        q, k, v = self.heads(qkv)
        q, k = self.q_norm(q.reshape(shape)).flatten(1), self.k_norm(k.reshape(shape)).flatten(1)
        return super().attend(torch.cat((q, k, v), dim=-1), cos_sin, out_cache_loc)


class GemmaLayer(nn.Module):
    """One layer: norms before and after each sub-layer."""

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
        """Compute the layer of x [tokens, hidden], the whole residual stream; ``residual`` stays None.

        Attention and MLP return partial sums. A norm needs the whole sum, so the ranks' parts are added before it.
        """
        y = self.self_attn(self.input_layernorm(x), cos_sin, out_cache_loc)
        x = x + self.post_attention_layernorm(self.comm.all_reduce(y))
        y = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(self.comm.all_reduce(y)), None


class Gemma3ForCausalLM(Decoder):
    """Gemma 3, text only."""

    model_type = "gemma3_text"
    defaults: ClassVar[Mapping[str, Any]] = {**_DEFAULTS, "rope_parameters": None}

    def __init__(self, config: ModelConfig, ctx: Context):
        super().__init__(config, ctx)
        convert(self, {VocabParallelEmbedding: ScaledEmbedding, RMSNormFused: FinalNorm})

    def rotary_embedding(self) -> nn.Module:
        """Build both tables."""
        c = self.config
        return RoPEByLayerType(c.rope_by_layer_type, c.head_dim, c.max_len, self.ctx.device)

    def block(self, index: int) -> nn.Module:
        """Build layer ``index``: without ``layer_types``, every sixth layer has full attention."""
        c = self.config
        local = (index + 1) % c.need("sliding_window_pattern") != 0
        kind = c.layer_type(index) or ("sliding_attention" if local else "full_attention")
        attention = GemmaAttention(
            index,
            c.hidden_size,
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
            self.ctx,
            kind=kind,
            window=c.need("sliding_window") if kind == "sliding_attention" else -1,
            eps=c.rms_norm_eps,
            scale=c.need("query_pre_attn_scalar") ** -0.5,
            qkv_bias=c.attention_bias,
            out_bias=c.attention_bias,
        )
        return GemmaLayer(attention, self.mlp(index), c, self.ctx)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits, capped if config.json has ``final_logit_softcapping``."""
        logits, cap = super().logits(hidden), self.config.raw["final_logit_softcapping"]
        return logits if cap is None else cap * torch.tanh(logits / cap)


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The text part of a multimodal Gemma 3. Its vision tower is not loaded; messages with images are refused."""

    model_type = "gemma3_text"

    def load(self, source: WeightSource) -> None:
        """Load the weights of the text part."""
        super().load(TextPart(source))


@hookimpl
def minisgl_models() -> Mapping[str, type]:
    """Register the architectures."""
    return {"Gemma3ForCausalLM": Gemma3ForCausalLM, MULTIMODAL: Gemma3ForConditionalGeneration}
