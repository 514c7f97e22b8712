"""gpt-oss: attention sinks, a window in every second layer, experts with biases and clamped gates. OpenAI, 2025.

The published weights are in MXFP4: `plugins/quantization/mx` reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.hooks import hookimpl
from minisgl.layers import AttentionLayer, Context
from minisgl.layers.weight_shards import WeightShard, split_rows
from minisgl.models.config import number
from minisgl.models.decoder import Decoder

GROUP = 32
"""Numbers in MXFP4 that share a scale."""
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The RoPE scaling of a config.json that has none, as in transformers."""


@hookimpl
def minisgl_read_config(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return config.json of a gpt-oss with the RoPE scaling that it leaves out."""
    scaled = raw.get("rope_scaling") or raw.get("rope_parameters")
    return {**raw, "rope_scaling": YARN} if raw.get("architectures") == ["GptOssForCausalLM"] and not scaled else None


class Sinks(nn.Module):
    """The score of the attention sink of each of this rank's ``here`` query heads."""

    def __init__(self, total: int, here: int, ctx: Context):
        super().__init__()
        self.total, self.start = total, ctx.comm.rank * here
        self.weight = ctx.parameter(here)

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Yield this rank's part of the tensor, whose name is that of the module."""
        yield WeightShard.part(prefix.removesuffix("."), (self.total,), 0, self.start, self.weight)


class SinkAttention(AttentionLayer):
    """Attention with a sink for each query head: see `minisgl.attention.LayerSpec`."""

    def __init__(self, index: int, hidden_size: int, q_heads: int, *heads: Any, **options: Any):
        super().__init__(index, hidden_size, q_heads, *heads, **options)
        self.sinks = Sinks(q_heads, self.spec.q_heads, self.ctx)
        self.spec = replace(self.spec, sinks=self.sinks.weight)


class Router(nn.Module):
    """Chooses the ``top_k`` experts with the largest scores. Their weights are the softmax of these scores alone."""

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, ctx: Context):
        super().__init__()
        self.top_k = top_k
        self.weight, self.bias = ctx.parameter(num_experts, hidden_size), ctx.parameter(num_experts)

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Yield the weight and the bias, which every rank holds in full."""
        yield WeightShard.whole(f"{prefix}weight", self.weight)
        yield WeightShard.whole(f"{prefix}bias", self.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return expert numbers and weights (float32), both [tokens, top_k], of x [tokens, hidden]."""
        scores, ids = F.linear(x, self.weight, self.bias).topk(self.top_k, dim=-1)
        return ids, scores.softmax(dim=-1, dtype=torch.float32)


class Experts(nn.Module):
    """Experts with biases. Rows of gates and up projections alternate; this rank has ``here`` pairs of each expert."""

    gate_up_blocks: Tensor  # with `keep_mxfp4`, [experts, out, in / 32, 16] uint8
    gate_up_scales: Tensor  # [experts, out, in / 32, 1] uint8
    down_blocks: Tensor
    down_scales: Tensor

    def __init__(self, hidden: int, inner: int, num_experts: int, alpha: float, limit: float, ctx: Context):
        super().__init__()
        self.rank, self.inner, self.alpha, self.limit = ctx.comm.rank, inner, alpha, limit
        self.moe: Any = ctx.part("moe")
        self.packed = False  # the weights are in MXFP4: see `keep_mxfp4`
        self.loaded: Any = None  # what a backend with ``load_clamped`` made of the weights
        here = split_rows(inner, ctx.comm.size, "expert size (intermediate_size)")
        self.gate_up, self.gate_up_bias = (
            ctx.parameter(num_experts, 2 * here, hidden),
            ctx.parameter(num_experts, 2 * here),
        )
        self.down, self.down_bias = ctx.parameter(num_experts, hidden, here), ctx.parameter(num_experts, hidden)

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Yield this rank's slices. The checkpoint has the transposed matrices, [experts, in, out]."""
        here, inner = self.gate_up_bias.shape[1] // 2, self.inner
        start = self.rank * here
        both = (len(self.gate_up_bias), 2 * inner)
        yield WeightShard.part(f"{prefix}gate_up_proj_bias", both, 1, 2 * start, self.gate_up_bias)
        yield WeightShard.whole(f"{prefix}down_proj_bias", self.down_bias)
        if self.packed:
            yield from self.packed_shards(prefix)
            return
        experts, hidden, _ = self.down.shape
        rows = (experts, hidden, 2 * inner)
        yield WeightShard.part(f"{prefix}gate_up_proj", rows, 2, 2 * start, self.gate_up.transpose(1, 2))
        yield WeightShard.part(f"{prefix}down_proj", (experts, inner, hidden), 1, start, self.down.transpose(1, 2))

    def keep_mxfp4(self) -> bool:
        """Load the weights in MXFP4, as they are stored, if the MoE backend multiplies them; return whether it does.

        A rank must have whole groups of 32 columns, which share a scale. Called before the weights are loaded.
        """
        (experts, hidden, here), dtype = self.down.shape, self.down.dtype
        if not hasattr(self.moe, "load_mxfp4") or dtype.itemsize != 2 or hidden % GROUP or here % GROUP:
            return False
        for name, rows, columns in (("gate_up", 2 * here, hidden), ("down", hidden, here)):
            setattr(self, name, None)
            for end, bytes_of_group in (("blocks", GROUP // 2), ("scales", 1)):
                shape = (experts, rows, columns // GROUP, bytes_of_group)
                part = torch.empty(shape, dtype=torch.uint8, device=self.down_bias.device)
                setattr(self, f"{name}_{end}", nn.Parameter(part, requires_grad=False))
        self.packed = True
        return True

    def packed_shards(self, prefix: str) -> Iterator[WeightShard]:
        """Yield this rank's slices of experts in MXFP4, which are stored as [experts, out, in / 32]."""
        experts, hidden, groups, _ = self.down_blocks.shape
        inner, rank = self.inner, self.rank
        rows = (experts, 2 * inner, hidden // GROUP)
        columns = (experts, hidden, inner // GROUP)
        for end, size in (("blocks", (GROUP // 2,)), ("scales", ())):
            gate_up, down = (getattr(self, f"{name}_{end}") for name in ("gate_up", "down"))
            gate_up, down = (part if size else part.squeeze(-1) for part in (gate_up, down))
            begin = rank * gate_up.shape[1]
            yield WeightShard.part(f"{prefix}gate_up_proj_{end}", (*rows, *size), 1, begin, gate_up)
            yield WeightShard.part(f"{prefix}down_proj_{end}", (*columns, *size), 2, rank * groups, down)

    def after_load(self) -> None:
        """Pass the weights to the MoE backend if it has such experts, with the rows of the gates first."""
        down_bias = self.down_bias if self.rank == 0 else None
        if self.packed:
            parts = (self.gate_up_blocks, self.gate_up_scales, self.gate_up_bias)
            blocks, scales, bias = map(gates_first, parts)
            self.loaded = self.moe.load_mxfp4(
                (blocks.flatten(2), scales.flatten(2)),
                bias,
                (self.down_blocks.flatten(2), self.down_scales.flatten(2)),
                down_bias,
                self.alpha,
                self.limit,
            )
            for name in ("gate_up_blocks", "gate_up_scales", "gate_up_bias"):
                setattr(self, name, None)
            return
        if hasattr(self.moe, "load_clamped"):
            for weight in (self.gate_up, self.gate_up_bias):
                weight.data = gates_first(weight)
            self.loaded = self.moe.load_clamped(
                self.gate_up, self.gate_up_bias, self.down, down_bias, self.alpha, self.limit
            )

    def expert(self, i: int, x: Tensor) -> Tensor:
        """Return the output of expert ``i`` for x [tokens, hidden], a partial sum. Rank 0 adds the last bias."""
        gate, up = F.linear(x, self.gate_up[i], self.gate_up_bias[i]).unflatten(-1, (-1, 2)).unbind(-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        y = (up + 1) * (gate * torch.sigmoid(self.alpha * gate))
        return F.linear(y, self.down[i], self.down_bias[i] if self.rank == 0 else None)

    def forward(self, x: Tensor, ids: Tensor, scale: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs, [tokens, hidden], a partial sum.

        ids and scale are [tokens, top_k]. The number of tokens of each expert is read on the host. A step that is
        recorded in a graph must not do that: then each expert computes all tokens, and its weight is 0 where it was not
        chosen.
        """
        if self.loaded is not None:
            out: Tensor = self.moe.forward(self.loaded, x, ids.int(), scale, torch.empty_like(x))
            return out
        out = torch.zeros_like(x)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return self.forward_all(x, ids, scale, out)
        order = ids.flatten().argsort(stable=True)  # the (token, choice) pairs, sorted by expert
        tokens, scale = order // ids.shape[1], scale.flatten()[order].unsqueeze(1).to(x.dtype)
        end = 0
        for i, count in enumerate(torch.bincount(ids.flatten(), minlength=len(self.down)).tolist()):
            begin, end = end, end + count
            if count:
                rows = tokens[begin:end]
                out.index_add_(0, rows, self.expert(i, x[rows]) * scale[begin:end])
        return out

    def forward_all(self, x: Tensor, ids: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        """Compute `forward` with the same operations whatever the router chose. ``out`` [tokens, hidden] is zeros."""
        weights = scale.new_zeros(len(x), len(self.down)).scatter_(1, ids, scale).to(x.dtype)
        for i in range(len(self.down)):
            out.addcmul_(self.expert(i, x), weights[:, i : i + 1])
        return out


def gates_first(rows: Tensor) -> Tensor:
    """Return ``rows`` [experts, 2·inner, ...], in which gates and up projections alternate, with the gates first."""
    return torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1)


class MoE(nn.Module):
    """A router and its experts. The output is a partial sum."""

    def __init__(self, router: Router, experts: Experts):
        super().__init__()
        self.router, self.experts = router, experts

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer of x [tokens, hidden]; returns a partial sum [tokens, hidden]."""
        out: Tensor = self.experts(x, *self.router(x))
        return out


class GptOssForCausalLM(Decoder):
    """gpt-oss."""

    model_type = "gpt_oss"
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "layer_types": None,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "attention_bias": True,
    }

    def attention(self, index: int, **options: Any) -> AttentionLayer:
        """Build the attention of layer ``index``: without ``layer_types``, layers 0, 2, … have a window."""
        c, bias = self.config, self.config.attention_bias
        kind = c.layer_type(index) or ("full_attention" if index % 2 else "sliding_attention")
        window = c.need("sliding_window") if kind == "sliding_attention" else -1
        heads = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        return SinkAttention(
            index, c.hidden_size, *heads, self.ctx, qkv_bias=bias, out_bias=bias, window=window, **options
        )

    def mlp(self, index: int, **options: Any) -> nn.Module:
        """Build the experts of layer ``index``."""
        c = self.config
        experts = c.need("num_local_experts")
        gate = (number(c.raw, "swiglu_alpha", 1.702), number(c.raw, "swiglu_limit", 7.0))
        return MoE(
            Router(c.hidden_size, experts, c.need("num_experts_per_tok"), self.ctx),
            Experts(c.hidden_size, c.intermediate_size, experts, *gate, self.ctx),
        )


@hookimpl
def minisgl_models() -> Mapping[str, type]:
    """Register the architecture."""
    return {"GptOssForCausalLM": GptOssForCausalLM}
