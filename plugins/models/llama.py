"""Llama 2 and 3: the shared decoder without changes, except for optional biases in the MLP.

Touvron et al., Llama 2, 2023; Dubey et al., The Llama 3 Herd, 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from minisgl.hooks import hookimpl
from minisgl.models.decoder import Decoder


class LlamaForCausalLM(Decoder):
    """Llama. ``attention_bias`` and ``mlp_bias`` of config.json add biases.

    The RoPE scaling of Llama 3 needs no code here: `ModelConfig` reads it from config.json.
    """

    model_type = "llama"

    def mlp(self, index: int, **options: Any) -> nn.Module:
        """Build the MLP of layer ``index``, with biases if config.json has ``mlp_bias``."""
        return super().mlp(index, bias=self.config.flag("mlp_bias"), **options)


@hookimpl
def minisgl_models() -> Mapping[str, type]:
    """Register the architecture."""
    return {"LlamaForCausalLM": LlamaForCausalLM}
