"""Llama 2 and 3: the decoder as it is. Touvron et al., Llama 2, 2023; Dubey et al., The Llama 3 Herd, 2024."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from minisgl.hooks import hookimpl
from minisgl.models.decoder import Decoder


class LlamaForCausalLM(Decoder):
    """``attention_bias`` and ``mlp_bias`` are honoured; Llama 3's RoPE scaling is in its config.json."""

    def mlp(self, index: int, **options: Any) -> nn.Module:
        return super().mlp(index, bias=bool(self.config.raw.get("mlp_bias", False)), **options)


@hookimpl
def minisgl_models() -> Mapping[str, type]:
    return {"LlamaForCausalLM": LlamaForCausalLM}
