"""Qwen3-Next: three layers of linear attention (gated delta rule) to one with gated full attention. Qwen Team, 2025.

A layer of linear attention has no KV, but a state of each request: `plugins/models/gated_delta.py`. The layers of
multi-token prediction (``mtp``) in a checkpoint are not loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.config import ConfigError
from minisgl.hooks import hookimpl
from minisgl.layers import AttentionLayer, Context, RMSNormFused, RoPE, RopeConfig
from minisgl.layers.linear import GatedMLP, LinearQKVMerged
from minisgl.layers.weight_shards import WeightShard, WeightSource, weight_shards_of
from minisgl.models.config import ModelConfig
from minisgl.models.converter import convert
from minisgl.models.decoder import Decoder
from minisgl.plugins.models.experts import MoELayer
from minisgl.plugins.models.gated_delta import GatedDeltaNet, Pieces
from minisgl.plugins.models.gemma3 import FinalNorm, GemmaNorm
from minisgl.plugins.models.states import WithStates

log = logging.getLogger(__name__)

ARCHITECTURE = "Qwen3NextForCausalLM"


@hookimpl
def minisgl_read_config(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return config.json of a Qwen3-Next as `with_full_layers` changes it."""
    return with_full_layers(raw, ARCHITECTURE) if raw.get("architectures") == [ARCHITECTURE] else None


def with_full_layers(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return config.json with ``full_attention_layers``, their indices, in place of the types of the layers.

    Raises `ConfigError` that names the architecture ``name`` if the types are wrong.
    """
    fields = dict(raw)
    types, interval, count = fields.pop("layer_types", None), fields.pop("full_attention_interval", 4), 0
    if isinstance(raw.get("num_hidden_layers"), int):
        count = raw["num_hidden_layers"]
    if types is None:
        if not isinstance(interval, int) or interval < 1:
            raise ConfigError(f"{name}: full_attention_interval must be a positive integer, got {interval!r}.")
        types = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)]
    if not isinstance(types, list) or len(types) != count:
        raise ConfigError(f"{name}: layer_types must have one entry for each of the {count} layers.")
    for kind in types:
        if kind not in ("full_attention", "linear_attention"):
            raise ConfigError(f"{name}: layer_types has {kind!r}: only full_attention and linear_attention are known.")
    full = [i for i, kind in enumerate(types) if kind == "full_attention"]
    if not full:
        raise ConfigError(f"{name}: layer_types has no full_attention, which at least one layer must have.")
    return {**fields, "full_attention_layers": full}


class PartialRoPE(nn.Module):
    """Cosines and sines for heads of which only the first ``rotated`` dimensions are rotated: `pairing` orders them.

    `minisgl.attention.rotate` rotates all pairs. Those that are not to be rotated have the angle 0.
    """

    def __init__(self, rope: RopeConfig, rotated: int, head_dim: int, positions: int, device: torch.device):
        super().__init__()
        cos, sin = RoPE(replace(rope, partial_rotary_factor=1.0), rotated, positions, device).cos_sin.chunk(2, dim=-1)
        rest = (positions, (head_dim - rotated) // 2)
        ones, zeros = torch.ones(rest, device=device), torch.zeros(rest, device=device)
        self.cos_sin = torch.cat((cos, ones, sin, zeros), dim=-1)

    def forward(self, positions: Tensor) -> Tensor:
        """Return the cosines and sines [n, head_dim], float32, of positions [n]."""
        return self.cos_sin.index_select(0, positions)


def pairing(rotated: int, head_dim: int) -> Tensor:
    """Return an order of a head's dimensions in which dimensions i and i + head_dim/2 form a pair.

    The checkpoint pairs i with i + rotated/2, for the first ``rotated`` dimensions. Scores do not depend on the order.
    """
    pairs, rest = torch.arange(rotated).chunk(2), torch.arange(rotated, head_dim).chunk(2)
    return torch.cat((pairs[0], *rest[:1], pairs[1], *rest[1:]))


class GatedAttention(AttentionLayer):
    """Full attention. Each query head has a gate for its output; queries and keys have zero-centred norms."""

    def __init__(self, index: int, rotated: int, c: ModelConfig, ctx: Context):
        heads, dim, bias = (c.num_attention_heads, c.num_key_value_heads), c.head_dim, c.attention_bias
        super().__init__(index, c.hidden_size, *heads, dim, ctx, out_bias=bias)
        # The rows of a head: its query, then its gate.
        self.qkv_proj = LinearQKVMerged(c.hidden_size, 2 * heads[0], heads[1], dim, ctx, bias=bias)
        self.q_norm, self.k_norm = GemmaNorm(dim, c.rms_norm_eps, ctx), GemmaNorm(dim, c.rms_norm_eps, ctx)
        self.order = pairing(rotated, dim).to(ctx.device)

    def attend(self, qkv: Tensor, cos_sin: Tensor, out_cache_loc: Tensor) -> Tensor:
        """Compute `AttentionLayer.attend`, and multiply each head's result with the sigmoid of its gate."""
        spec, dim = self.spec, self.spec.head_dim
        both, k, v = qkv.split([2 * spec.q_heads * dim, spec.kv_heads * dim, spec.kv_heads * dim], dim=-1)
        q, gate = both.unflatten(-1, (spec.q_heads, 2, dim)).unbind(2)
        q = self.q_norm(q).index_select(-1, self.order)
        k = self.k_norm(k.unflatten(-1, (-1, dim))).index_select(-1, self.order)
        out = super().attend(torch.cat((q.flatten(1), k.flatten(1), v), dim=-1), cos_sin, out_cache_loc)
        return out * torch.sigmoid(gate.flatten(1))


class SharedExpertMoE(MoELayer):
    """An MoE layer with one more expert, which computes every token, and a gate for its output."""

    softmax_routing: ClassVar[bool] = True

    def __init__(self, c: ModelConfig, ctx: Context):
        experts, top_k = c.num_experts or c.need("num_experts"), c.need("num_experts_per_tok")
        sizes = (c.hidden_size, c.need("moe_intermediate_size"), experts, top_k)
        super().__init__(*sizes, c.hidden_act, ctx, renormalize=c.flag("norm_topk_prob", True))
        self.shared_expert = GatedMLP(c.hidden_size, c.need("shared_expert_intermediate_size"), c.hidden_act, ctx)
        self.shared_expert_gate = ctx.parameter(1, c.hidden_size)

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Yield also the shards of the shared expert and its gate."""
        yield from super().weight_shards(prefix, names)
        yield from weight_shards_of(self.shared_expert, f"{prefix}shared_expert.", names)
        yield WeightShard.whole(f"{prefix}shared_expert_gate.weight", self.shared_expert_gate)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer of x [tokens, hidden]; returns a partial sum."""
        shared: Tensor = torch.sigmoid(F.linear(x, self.shared_expert_gate)) * self.shared_expert(x)
        experts: Tensor = super().forward(x)
        return experts + shared


class Qwen3NextLayer(nn.Module):
    """One layer: linear or full attention, then an MLP, each after a zero-centred norm."""

    def __init__(self, mixer: nn.Module, mlp: nn.Module, c: ModelConfig, ctx: Context):
        super().__init__()
        self.comm = ctx.comm
        self.input_layernorm = GemmaNorm(c.hidden_size, c.rms_norm_eps, ctx)
        if isinstance(mixer, GatedDeltaNet):
            self.linear_attn = mixer
        else:
            self.self_attn = mixer
        self.post_attention_layernorm = GemmaNorm(c.hidden_size, c.rms_norm_eps, ctx)
        self.mlp = mlp

    def forward(self, x: Tensor, residual: None, cos_sin: Tensor, out_cache_loc: Tensor) -> tuple[Tensor, None]:
        """Compute the layer of x [tokens, hidden], the whole residual stream; ``residual`` stays None."""
        y = self.input_layernorm(x)
        y = self.linear_attn(y) if hasattr(self, "linear_attn") else self.self_attn(y, cos_sin, out_cache_loc)
        x = x + self.comm.all_reduce(y)
        return x + self.comm.all_reduce(self.mlp(self.post_attention_layernorm(x))), None


class WithoutPrediction:
    """The tensors of a checkpoint without the layers of multi-token prediction."""

    def __init__(self, source: WeightSource):
        self.source, self.fill, self.names = source, source.fill, source.names
        if source.names is not None:
            self.names = frozenset(name for name in source.names if not name.startswith("mtp."))
            if ignored := len(source.names) - len(self.names):
                log.info("%d tensors of multi-token prediction (mtp) are not loaded", ignored)


class Qwen3NextForCausalLM(WithStates, Decoder):
    """Qwen3-Next."""

    model_type = "qwen3_next"
    linear_attention: ClassVar[type[GatedDeltaNet]] = GatedDeltaNet
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "full_attention_layers": None,
    }

    def __init__(self, config: ModelConfig, ctx: Context):
        super().__init__(config, ctx)
        convert(self, {RMSNormFused: FinalNorm})

    @cached_property
    def pieces(self) -> Pieces:
        """What the layers of linear attention share."""
        return Pieces()

    @property
    def rotated(self) -> int:
        """Number of dimensions of a head that are rotated."""
        rotated = int(self.config.head_dim * self.config.rope.partial_rotary_factor)
        if not 0 < rotated <= self.config.head_dim or rotated % 2 or self.config.head_dim % 2:
            raise ConfigError(
                f"{rotated} of the {self.config.head_dim} dimensions of a head can't be rotated in pairs."
            )
        return rotated

    def rotary_embedding(self) -> nn.Module:
        """Build the table of the rotated dimensions."""
        c = self.config
        return PartialRoPE(c.rope, self.rotated, c.head_dim, c.max_len, self.ctx.device)

    def block(self, index: int) -> nn.Module:
        """Build layer ``index``. Layers with KV and layers with a state are numbered on their own."""
        c, full = self.config, self.config.raw["full_attention_layers"]
        before = sum(other < index for other in full)
        mixer: nn.Module
        if index in full:
            mixer = GatedAttention(before, self.rotated, c, self.ctx)
        else:
            mixer = self.linear_attention(index - before, self.pieces, c, self.ctx)
        return Qwen3NextLayer(mixer, self.mlp(index), c, self.ctx)

    def mlp(self, index: int, **options: Any) -> nn.Module:
        """Build the experts of layer ``index``, or a dense MLP if config.json says so for this layer."""
        c = self.config
        dense_layers = c.raw.get("mlp_only_layers") or []
        if not isinstance(dense_layers, list):
            raise ConfigError(f"mlp_only_layers must be a list of layer numbers, got {dense_layers!r}.")
        if index in dense_layers or not c.num_experts or (index + 1) % c.need("decoder_sparse_step"):
            return super().mlp(index, **options)
        return SharedExpertMoE(c, self.ctx)

    def state_shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return the sizes of the states of all layers of linear attention, in order."""
        linear = [module for module in self.layers.modules() if isinstance(module, GatedDeltaNet)]
        return [shape for layer in linear for shape in layer.state_shapes()]

    def keep_tokens(self, number: int) -> None:
        """Let all layers of linear attention keep tokens."""
        for module in self.layers.modules():
            if isinstance(module, GatedDeltaNet):
                module.kept = number

    def load(self, source: WeightSource) -> None:
        """Load all weights but those of multi-token prediction."""
        super().load(WithoutPrediction(source))


@hookimpl
def minisgl_models() -> Mapping[str, type]:
    """Register the architecture."""
    return {ARCHITECTURE: Qwen3NextForCausalLM}
