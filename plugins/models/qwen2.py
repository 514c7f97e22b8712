"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values. Yang et al., Qwen2 Technical Report, 2024."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from minisgl.hooks import hookimpl
from minisgl.layers import AttentionLayer
from minisgl.models.decoder import Decoder


class Qwen2ForCausalLM(Decoder):
    """Qwen2. With ``use_sliding_window`` in config.json, some layers have a window: see `ModelConfig.window`."""

    model_type = "qwen2"
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 32,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
    }

    def attention(self, index: int, **options: Any) -> AttentionLayer:
        """Build the attention of layer ``index`` with biases on queries, keys and values."""
        return super().attention(index, qkv_bias=True, out_bias=False, window=self.config.window(index), **options)


@hookimpl
def minisgl_models() -> Mapping[str, type]:
    """Register the architecture."""
    return {"Qwen2ForCausalLM": Qwen2ForCausalLM}
