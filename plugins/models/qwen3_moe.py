"""Qwen3 mixture of experts: Qwen3 with MoE layers in place of MLPs.

Yang et al., Qwen3 Technical Report, 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from minisgl.hooks import hookimpl
from minisgl.layers import AttentionLayer, MoELayer
from minisgl.models.decoder import Decoder


class Qwen3MoeForCausalLM(Decoder):
    """Qwen3-MoE.

    Every ``decoder_sparse_step``-th layer has experts, unless ``mlp_only_layers`` lists it. All others have a
    dense MLP.
    """

    def attention(self, index: int, **options: Any) -> AttentionLayer:
        """Build the attention of layer ``index`` with QK-norm."""
        c = self.config
        return super().attention(index, qk_norm_eps=c.rms_norm_eps, window=c.sliding_window or -1, **options)

    def mlp(self, index: int, **options: Any) -> nn.Module:
        """Build the MoE layer of layer ``index``, or a dense MLP if config.json says so for this layer."""
        c, raw = self.config, self.config.raw
        dense = index in (raw.get("mlp_only_layers") or ()) or (index + 1) % raw.get("decoder_sparse_step", 1)
        if dense or c.num_experts == 0:
            return super().mlp(index, **options)
        return MoELayer(
            c.hidden_size,
            c.need("moe_intermediate_size"),
            c.num_experts,
            c.need("num_experts_per_tok"),
            c.hidden_act,
            self.ctx,
            renormalize=bool(raw.get("norm_topk_prob", False)),
        )


@hookimpl
def minisgl_models() -> Mapping[str, type]:
    """Register the architecture."""
    return {"Qwen3MoeForCausalLM": Qwen3MoeForCausalLM}
