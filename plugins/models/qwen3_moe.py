"""Qwen3 mixture of experts: Qwen3 with MoE layers in place of MLPs.

Yang et al., Qwen3 Technical Report, 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from minisgl.config import ConfigError
from minisgl.hooks import hookimpl
from minisgl.layers import AttentionLayer
from minisgl.models.decoder import Decoder
from minisgl.plugins.models.experts import MoELayer


class Qwen3MoeForCausalLM(Decoder):
    """Qwen3-MoE.

    Every ``decoder_sparse_step``-th layer has experts, unless ``mlp_only_layers`` lists it. All others have a
    dense MLP.
    """

    model_type = "qwen3_moe"
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 4,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }

    def attention(self, index: int, **options: Any) -> AttentionLayer:
        """Build the attention of layer ``index`` with QK-norm."""
        c = self.config
        return super().attention(index, qk_norm_eps=c.rms_norm_eps, window=c.sliding_window or -1, **options)

    def mlp(self, index: int, **options: Any) -> nn.Module:
        """Build the MoE layer of layer ``index``, or a dense MLP if config.json says so for this layer."""
        c = self.config
        dense_layers = c.raw.get("mlp_only_layers") or []
        if not isinstance(dense_layers, list):
            raise ConfigError(f"mlp_only_layers must be a list of layer numbers, got {dense_layers!r}.")
        dense = index in dense_layers or (index + 1) % c.need("decoder_sparse_step")
        if dense:
            return super().mlp(index, **options)
        return MoELayer(
            c.hidden_size,
            c.need("moe_intermediate_size"),
            c.num_experts or c.need("num_experts"),
            c.need("num_experts_per_tok"),
            c.hidden_act,
            self.ctx,
            renormalize=c.flag("norm_topk_prob"),
        )


@hookimpl
def minisgl_models() -> Mapping[str, type]:
    """Register the architecture."""
    return {"Qwen3MoeForCausalLM": Qwen3MoeForCausalLM}
