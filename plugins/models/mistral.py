"""Mistral: Llama with a sliding window in every layer. Jiang et al., Mistral 7B, 2023."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.layers import AttentionLayer
from minisgl.models.decoder import Decoder


class MistralForCausalLM(Decoder):
    """Mistral. ``sliding_window`` null in config.json, as in later releases, means full attention."""

    def attention(self, index: int, **options: Any) -> AttentionLayer:
        """Build the attention of layer ``index`` with the sliding window of config.json."""
        return super().attention(index, window=self.config.sliding_window or -1, **options)


@hookimpl
def minisgl_models() -> Mapping[str, type]:
    """Register the architecture."""
    return {"MistralForCausalLM": MistralForCausalLM}
