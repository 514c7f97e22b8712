"""Qwen3-Next: three layers of linear attention (gated delta rule) to one with gated full attention. Qwen Team, 2025.

A layer of linear attention has no KV. Each request has a state of fixed size in it, which absorbs token after token: a
matrix for each value head, and the last inputs of a short convolution. docs/design/states.md says who owns the states.
Yang et al., Gated Delta Networks, 2024. The multi-token prediction layers (``mtp``) of a checkpoint are not loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.attention import AttnBatch
from minisgl.config import ConfigError
from minisgl.hooks import hookimpl
from minisgl.layers import AttentionLayer, Context, RMSNorm, RMSNormFused, RoPE, RopeConfig
from minisgl.layers.linear import GatedMLP, LinearColParallelMerged, LinearQKVMerged, LinearRowParallel
from minisgl.layers.weight_shards import WeightShard, WeightSource, split_rows, weight_shards_of
from minisgl.models.config import ModelConfig
from minisgl.models.converter import convert
from minisgl.models.decoder import Decoder
from minisgl.plugins.models.experts import MoELayer
from minisgl.plugins.models.gemma3 import FinalNorm, GemmaNorm

log = logging.getLogger(__name__)

ARCHITECTURE = "Qwen3NextForCausalLM"
CHUNK = 64
"""Tokens of a prompt whose values are computed together."""


@hookimpl
def minisgl_read_config(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return config.json of a Qwen3-Next with ``full_attention_layers``, their indices, in place of the types."""
    if raw.get("architectures") != [ARCHITECTURE]:
        return None
    fields = dict(raw)
    types, interval, count = fields.pop("layer_types", None), fields.pop("full_attention_interval", 4), 0
    if isinstance(raw.get("num_hidden_layers"), int):
        count = raw["num_hidden_layers"]
    if types is None:
        if not isinstance(interval, int) or interval < 1:
            raise ConfigError(f"{ARCHITECTURE}: full_attention_interval must be a positive integer, got {interval!r}.")
        types = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)]
    if not isinstance(types, list) or len(types) != count:
        raise ConfigError(f"{ARCHITECTURE}: layer_types must have one entry for each of the {count} layers.")
    for kind in types:
        if kind not in ("full_attention", "linear_attention"):
            raise ConfigError(
                f"{ARCHITECTURE}: layer_types has {kind!r}: only full_attention and linear_attention are known."
            )
    full = [i for i, kind in enumerate(types) if kind == "full_attention"]
    if not full:
        raise ConfigError(f"{ARCHITECTURE}: layer_types has no full_attention, which at least one layer must have.")
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


class GatedNorm(RMSNorm):
    """RMSNorm of each head, whose result is multiplied with silu(gate)."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        """Normalise x [..., head_dim] in float32 and multiply it with silu(gate), which has the same shape."""
        normed = self.weight * F.rms_norm(x.float(), self.weight.shape, eps=self.eps).to(x.dtype)
        return (normed * F.silu(gate.float())).to(x.dtype)


class GatedDeltaNet(nn.Module):
    """Linear attention with the gated delta rule; heads are split over the ranks, by whole key heads.

    ``number`` counts the layers of this kind. The output is a partial sum.
    """

    def __init__(self, number: int, c: ModelConfig, ctx: Context):
        super().__init__()
        self.number, self.ctx = number, ctx
        self.all_k_heads, self.dk, self.dv = (
            c.need(f"linear_{size}") for size in ("num_key_heads", "key_head_dim", "value_head_dim")
        )
        v_heads, self.kernel = c.need("linear_num_value_heads"), c.need("linear_conv_kernel_dim")
        if v_heads % self.all_k_heads:
            raise ConfigError(f"linear_num_value_heads ({v_heads}) must be a multiple of {self.all_k_heads} key heads.")
        self.k_heads = split_rows(self.all_k_heads, ctx.comm.size, "key heads of linear attention")
        self.ratio = v_heads // self.all_k_heads  # value heads of a key head
        self.v_heads = self.k_heads * self.ratio
        # A key head has, one after another: query, key, its values, their gates; and of its value heads: betas, decays.
        sizes = (2 * self.dk + 2 * self.ratio * self.dv, 2 * self.ratio)
        rows = [self.all_k_heads * size for size in sizes]
        self.in_proj = LinearColParallelMerged(c.hidden_size, rows, ("in_proj_qkvz", "in_proj_ba"), ctx)
        self.features = [
            self.k_heads * self.dk,
            self.k_heads * self.dk,
            self.v_heads * self.dv,
        ]  # queries, keys, values
        self.conv = ctx.parameter(sum(self.features), 1, self.kernel)
        self.dt_bias, self.A_log = ctx.parameter(self.v_heads), ctx.parameter(self.v_heads)
        self.norm = GatedNorm(self.dv, c.rms_norm_eps, ctx)
        self.out_proj = LinearRowParallel(v_heads * self.dv, c.hidden_size, ctx, reduce=False)

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Yield the shards of the projections, and this rank's heads of the other tensors."""
        for name in ("in_proj", "norm", "out_proj"):
            yield from weight_shards_of(getattr(self, name), f"{prefix}{name}.", names)
        rank, size, begin, base = self.ctx.comm.rank, self.ctx.comm.size, 0, 0
        shape = (size * sum(self.features), 1, self.kernel)
        for here in self.features:
            yield WeightShard.part(
                f"{prefix}conv1d.weight", shape, 0, base + rank * here, self.conv[begin : begin + here]
            )
            begin, base = begin + here, base + size * here
        for name in ("dt_bias", "A_log"):
            start = rank * self.v_heads
            yield WeightShard.part(f"{prefix}{name}", (size * self.v_heads,), 0, start, getattr(self, name))

    def state_shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return the sizes of one request's state: the last inputs of the convolution, and a matrix for each head."""
        inputs = ((sum(self.features), self.kernel - 1), self.ctx.dtype)
        return [inputs, ((self.v_heads, self.dk, self.dv), torch.float32)]

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer of x [tokens, hidden], row by row of the step; decode rows are one batch.

        Each row goes on with the state in its slot, or with zeros if it begins at position 0, and leaves its new state.
        """
        batch = self.ctx.batch
        assert batch is not None
        n, ratio = len(x), self.ratio
        projected, ba = self.in_proj(x).split([self.in_proj.parts[0][3], self.in_proj.parts[1][3]], dim=-1)
        by_head = projected.view(n, self.k_heads, -1).split(
            [self.dk, self.dk, ratio * self.dv, ratio * self.dv], dim=-1
        )
        q, k, v, gate = (part.flatten(1) for part in by_head)
        beta, decay = (part.flatten(1) for part in ba.view(n, self.k_heads, -1).chunk(2, dim=-1))
        log_decay = -self.A_log.float().exp() * F.softplus(decay.float() + self.dt_bias)
        beta = beta.sigmoid().float()
        mixed, out = torch.cat((q, k, v), dim=-1), torch.empty_like(v)
        for rows, first, count in _row_groups(batch):
            tokens = slice(first, first + (rows.stop - rows.start) * count)
            parts = (part[tokens].unflatten(0, (-1, count)) for part in (mixed, beta, log_decay))
            out[tokens] = self._absorb(batch, rows, *parts).flatten(0, 1)
        heads = (n, self.v_heads, self.dv)
        result: Tensor = self.out_proj(self.norm(out.view(heads), gate.reshape(heads)).flatten(1))
        return result

    def _absorb(self, batch: AttnBatch, rows: slice, mixed: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
        """Absorb equally many tokens of some rows: [rows, tokens, features]. Return what is read, and keep states."""
        inputs, matrices = self.ctx.states[2 * self.number : 2 * self.number + 2]
        slots, count = batch.req_pool_indices[rows].long(), mixed.shape[1]
        begins = (batch.seq_lens[rows] == count).view(-1, 1, 1)
        window = torch.cat((inputs[slots].masked_fill(begins, 0.0), mixed.transpose(1, 2)), dim=-1)
        inputs[slots] = window[..., count:]
        features = F.silu(F.conv1d(window, self.conv, groups=len(self.conv))).transpose(1, 2)
        q, k, v = (
            part.unflatten(-1, (-1, dim)).transpose(1, 2).float()  # [rows, heads, tokens, dim]
            for part, dim in zip(features.split(self.features, dim=-1), (self.dk, self.dk, self.dv), strict=True)
        )
        q, k = _unit(q).repeat_interleave(self.ratio, 1) * self.dk**-0.5, _unit(k).repeat_interleave(self.ratio, 1)
        state, read = matrices[slots].masked_fill(begins[..., None], 0.0), []
        scalars = beta.transpose(1, 2), log_decay.transpose(1, 2)
        for start in range(0, count, CHUNK):
            chunk = slice(start, start + CHUNK)
            *parts, betas, decays = (part[:, :, chunk] for part in (q, k, v, *scalars))
            values, state = delta_rule(parts[0], parts[1], parts[2], betas, decays, state)
            read.append(values)
        matrices[slots] = state
        return torch.cat(read, dim=2).transpose(1, 2).flatten(2).to(mixed.dtype)


def _row_groups(batch: AttnBatch) -> Iterator[tuple[slice, int, int]]:
    """Yield groups of rows with equally many tokens: (rows, first token, tokens of a row): first all decode rows."""
    if batch.num_decode:
        yield slice(0, batch.num_decode), 0, 1
    borders = batch.cu_seqlens_q_cpu.tolist()
    for row in range(batch.num_decode, len(borders) - 1):
        yield slice(row, row + 1), borders[row], borders[row + 1] - borders[row]


def _unit(x: Tensor) -> Tensor:
    """Return x [..., dim] with length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Absorb a chunk of tokens into ``state`` and read it after each token. Return what is read, and the new state.

    q and k are [..., tokens, dk], v is [..., tokens, dv], ``beta`` and ``log_decay`` [..., tokens], ``state`` [..., dk,
    dv]. Token i makes of the state S first S' = exp(log_decay_i)·S. Then it adds k_i·u_i, where
    u_i = beta_i·(v_i - k_i·S') corrects what S' holds for k_i, and q_i reads the sum. All u_i of the chunk are the
    solution of one triangular system.
    """
    total = log_decay.cumsum(-1)
    past = (total[..., :, None] - total[..., None, :]).tril().exp().tril()  # decay from token j up to token i ≥ j
    from_state = total.exp()[..., None]
    system = (k @ k.mT) * past * beta[..., None]
    target = beta[..., None] * (v - from_state * (k @ state))
    u = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    read = from_state * (q @ state) + ((q @ k.mT) * past) @ u
    to_end = (total[..., -1:] - total).exp()[..., None]
    return read, state * from_state[..., -1:, :] + (k * to_end).mT @ u


class SharedExpertMoE(MoELayer):
    """An MoE layer with one more expert, which computes every token, and a gate for its output."""

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


class Qwen3NextForCausalLM(Decoder):
    """Qwen3-Next."""

    model_type = "qwen3_next"
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
            mixer = GatedDeltaNet(index - before, c, self.ctx)
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

    def load(self, source: WeightSource) -> None:
        """Load all weights but those of multi-token prediction."""
        super().load(WithoutPrediction(source))


@hookimpl
def minisgl_models() -> Mapping[str, type]:
    """Register the architecture."""
    return {ARCHITECTURE: Qwen3NextForCausalLM}
