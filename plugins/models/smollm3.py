"""SmolLM3: Llama without RoPE in every fourth layer. Hugging Face, SmolLM3, 2025; Yang et al., RNoPE-SWA, 2025."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from minisgl.config import ConfigError
from minisgl.hooks import hookimpl
from minisgl.layers import AttentionLayer
from minisgl.models.decoder import Decoder


class NoPEAttention(AttentionLayer):
    """Attention without positions: queries and keys are not rotated. Kazemnejad et al., 2023."""

    def attend(self, qkv: Tensor, cos_sin: Tensor, out_cache_loc: Tensor) -> Tensor:
        """Rotate by an angle of 0, whose cosine is 1 and whose sine is 0."""
        unrotated = cos_sin.new_zeros(cos_sin.shape)
        unrotated[:, : self.spec.head_dim // 2] = 1
        return super().attend(qkv, unrotated, out_cache_loc)


class SmolLM3ForCausalLM(Decoder):
    """SmolLM3. ``no_rope_layers`` of config.json has one number for each layer: 1 if it has RoPE, 0 if not.

    ``no_rope_layer_interval`` n replaces a missing list: every n-th layer has no RoPE. With ``use_sliding_window``,
    the layers without RoPE have a window, unless ``layer_types`` says otherwise.
    """

    model_type = "smollm3"
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_theta": 2000000.0,
        "use_sliding_window": False,
        "layer_types": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
    }

    def has_rope(self, index: int) -> bool:
        """Return whether layer ``index`` rotates queries and keys. Raises `ConfigError` for a malformed list."""
        c = self.config
        listed = c.raw["no_rope_layers"]
        if listed is None:
            return (index + 1) % c.need("no_rope_layer_interval") != 0
        if not isinstance(listed, list) or len(listed) < c.num_hidden_layers or any(n not in (0, 1) for n in listed):
            raise ConfigError(f"no_rope_layers must have 0 or 1 for each of the {c.num_hidden_layers} layers.")
        return bool(listed[index])

    def attention(self, index: int, **options: Any) -> AttentionLayer:
        """Build the attention of layer ``index``, with or without RoPE."""
        c, rotated = self.config, self.has_rope(index)
        local = c.layer_type(index) == "sliding_attention" if c.raw["layer_types"] is not None else not rotated
        window = c.window(index) if local and c.flag("use_sliding_window") and c.sliding_window else -1
        if rotated:
            return super().attention(index, window=window, **options)
        bias = c.attention_bias
        heads = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        return NoPEAttention(
            index, c.hidden_size, *heads, self.ctx, qkv_bias=bias, out_bias=bias, window=window, **options
        )

    def mlp(self, index: int, **options: Any) -> nn.Module:
        """Build the MLP of layer ``index``, with biases if config.json has ``mlp_bias``."""
        return super().mlp(index, bias=self.config.flag("mlp_bias"), **options)


@hookimpl
def minisgl_models() -> Mapping[str, type]:
    """Register the architecture."""
    return {"SmolLM3ForCausalLM": SmolLM3ForCausalLM}
