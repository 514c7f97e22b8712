"""Mistral: Llama with a sliding window in every layer. Jiang et al., Mistral 7B, 2023."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.layers import AttentionLayer
from minisgl.models.decoder import Decoder


class MistralForCausalLM(Decoder):
    """``sliding_window`` null, as in later releases, is full attention."""

    def attention(self, index: int, **options: Any) -> AttentionLayer:
        return super().attention(index, window=self.config.sliding_window or -1, **options)


@hookimpl
def minisgl_models() -> Mapping[str, type]:
    return {"MistralForCausalLM": MistralForCausalLM}
