"""Qwen3: Llama with an RMSNorm on each query and key head. Yang et al., Qwen3 Technical Report, 2025."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from minisgl.hooks import hookimpl
from minisgl.layers import AttentionLayer
from minisgl.models.decoder import Decoder


class Qwen3ForCausalLM(Decoder):
    """Dense Qwen3, as opposed to the mixture-of-experts models."""

    model_type = "qwen3"
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
    }

    def attention(self, index: int, **options: Any) -> AttentionLayer:
        """Build the attention of layer ``index`` with QK-norm."""
        c = self.config
        return super().attention(index, qk_norm_eps=c.rms_norm_eps, window=c.window(index), **options)


@hookimpl
def minisgl_models() -> Mapping[str, type]:
    """Register the architecture."""
    return {"Qwen3ForCausalLM": Qwen3ForCausalLM}
