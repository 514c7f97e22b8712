"""Mistral: Llama with a sliding window in every layer. Jiang et al., Mistral 7B, 2023."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from minisgl.hooks import hookimpl
from minisgl.layers import AttentionLayer
from minisgl.models.decoder import Decoder


class MistralForCausalLM(Decoder):
    """Mistral. ``sliding_window`` null in config.json, as in later releases, means full attention."""

    model_type = "mistral"
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8, "sliding_window": 4096, "layer_types": None}

    def attention(self, index: int, **options: Any) -> AttentionLayer:
        """Build the attention of layer ``index``, without biases, and with the window of config.json.

        In Ministral, ``layer_types`` says which layers have the window.
        """
        c = self.config
        full = c.raw["sliding_window"] is None or c.layer_type(index) == "full_attention"
        window = -1 if full else c.need("sliding_window")
        return super().attention(index, qkv_bias=False, out_bias=False, window=window, **options)


@hookimpl
def minisgl_models() -> Mapping[str, type]:
    """Register the architecture."""
    return {"MistralForCausalLM": MistralForCausalLM}
