"""Qwen3.5: Qwen3-Next with other projections of linear attention, dense or with experts. Qwen Team, 2026.

The text part of the multimodal checkpoints is served, without their vision tower. In text, the three positions of a
token, by which the vision part rotates heads, are equal, so RoPE is the usual one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from minisgl.config import ConfigError
from minisgl.hooks import hookimpl
from minisgl.layers.linear import Merged
from minisgl.layers.weight_shards import WeightSource
from minisgl.plugins.models.gated_delta import GatedDeltaNet
from minisgl.plugins.models.multimodal import TextPart, text_config
from minisgl.plugins.models.qwen3_next import Qwen3NextForCausalLM, SharedExpertMoE, with_full_layers


class SeparateProjections(GatedDeltaNet):
    """A gated delta net whose checkpoint has a matrix for queries, keys and values, and others for all else."""

    gated_delta_rule: ClassVar[bool] = True

    def input_projection(self, hidden_size: int) -> Merged:
        """Build the projection, whose rows are queries, keys, values, gates, betas and decays."""
        rank, size, begin, parts = self.ctx.comm.rank, self.ctx.comm.size, 0, []
        for here in self.features:
            parts.append(("in_proj_qkv", size * sum(self.features), begin + rank * here, here))
            begin += size * here
        for name, here in (("z", self.features[2]), ("b", self.v_heads), ("a", self.v_heads)):
            parts.append((f"in_proj_{name}", size * here, rank * here, here))
        return Merged(hidden_size, parts, False, self.ctx)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and values of x [n, hidden], one after another, their gates, betas and decays."""
        sizes = [sum(self.features), self.features[2], self.v_heads, self.v_heads]
        mixed, gate, beta, decay = self.in_proj(x).split(sizes, dim=-1)
        return mixed, gate, beta, decay


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):  # noqa: N801 - the architecture's name
    """Qwen3.5 with dense MLPs."""

    model_type = "qwen3_5_text"
    linear_attention = SeparateProjections
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 4,
        "attn_output_gate": True,
        **{
            key: value
            for key, value in Qwen3NextForCausalLM.defaults.items()
            if key.startswith("linear_") or key in ("head_dim", "partial_rotary_factor", "full_attention_layers")
        },
    }

    def load(self, source: WeightSource) -> None:
        """Load the weights of the text part."""
        super().load(TextPart(source))


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):  # noqa: N801
    """Qwen3.5 with experts in every layer."""

    model_type = "qwen3_5_moe_text"
    defaults: ClassVar[Mapping[str, Any]] = {
        **Qwen3_5ForCausalLM.defaults,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }

    def mlp(self, index: int, **options: Any) -> nn.Module:
        """Build the experts of layer ``index``."""
        return SharedExpertMoE(self.config, self.ctx)


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):  # noqa: N801
    """The text part of a multimodal Qwen3.5."""

    model_type = "qwen3_5_text"


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):  # noqa: N801
    """The text part of a multimodal Qwen3.5 with experts."""

    model_type = "qwen3_5_moe_text"


CLASSES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        Qwen3_5ForCausalLM,
        Qwen3_5MoeForCausalLM,
        Qwen3_5ForConditionalGeneration,
        Qwen3_5MoeForConditionalGeneration,
    )
}


@hookimpl
def minisgl_read_config(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return config.json of a Qwen3.5, with the text part of a multimodal one at the top level."""
    architectures = raw.get("architectures") or [""]
    name = architectures[0]
    if len(architectures) != 1 or name not in CLASSES:
        return None
    if "ConditionalGeneration" in name:
        raw = text_config(raw, name, tied=False)
    if raw.get("attn_output_gate", True) is not True:
        raise ConfigError(f"{name}: attn_output_gate={raw['attn_output_gate']!r} is not supported: it must be true.")
    fields = with_full_layers(raw, name)
    if "Moe" in name:  # it has no dense MLP
        fields.setdefault("intermediate_size", fields.get("moe_intermediate_size", 512))
    return fields


@hookimpl
def minisgl_models() -> Mapping[str, type]:
    """Register the architectures."""
    return CLASSES
