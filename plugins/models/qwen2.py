"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values. Yang et al., Qwen2 Technical Report, 2024."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.layers import AttentionLayer
from minisgl.models.decoder import Decoder


class Qwen2ForCausalLM(Decoder):
    """Qwen2. Unless ``use_sliding_window`` is false in config.json, `ModelConfig.window` is each layer's window."""

    def attention(self, index: int, **options: Any) -> AttentionLayer:
        """Build the attention of layer ``index`` with biases on queries, keys and values."""
        return super().attention(index, qkv_bias=True, out_bias=False, window=self.config.window(index), **options)


@hookimpl
def minisgl_models() -> Mapping[str, type]:
    """Register the architecture."""
    return {"Qwen2ForCausalLM": Qwen2ForCausalLM}
