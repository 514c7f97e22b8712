"""Linear layers split over the tensor-parallel ranks: by output (column-parallel) or by input (row-parallel).

Shoeybi et al., Megatron-LM, 2019. A merged layer stores several of the checkpoint's matrices as one matrix, so that one
matrix product computes them all. When loading, each part has the checkpoint's own name: ``self_attn.qkv_proj`` is
filled from ``self_attn.q_proj``, ``k_proj`` and ``v_proj``.

The gated MLP consists of two such layers (Shazeer, GLU Variants Improve Transformer, 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.config import ConfigError
from minisgl.layers.context import Context
from minisgl.layers.weight_shards import WeightShard, split_rows


class Merged(nn.Module):
    """Several column-parallel matrices with the same input, stored as one matrix.

    ``parts`` lists for each matrix (name, rows in the checkpoint, this rank's first row, number of this rank's rows).
    """

    def __init__(self, in_size: int, parts: Sequence[tuple[str, int, int, int]], bias: bool, ctx: Context):
        super().__init__()
        self.parts = tuple(parts)
        rows = sum(here for *_, here in parts)
        self.weight = ctx.parameter(rows, in_size)
        self.bias = ctx.parameter(rows) if bias else None

    def full_names(self, prefix: str) -> list[str]:
        """Return the name of each part in the checkpoint. ``prefix`` is the name of this layer, with a dot."""
        beside = prefix[:-1].rpartition(".")[0]
        return [f"{beside}.{name}" if beside else name for name, *_ in self.parts]

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Yield this rank's rows of each part, under the part's name beside the merged layer."""
        begin = 0
        for full, (_, total, start, here) in zip(self.full_names(prefix), self.parts, strict=True):
            rows, shape = slice(begin, begin + here), (total, self.weight.shape[1])
            yield WeightShard.part(f"{full}.weight", shape, 0, start, self.weight[rows])
            if self.bias is not None:
                yield WeightShard.part(f"{full}.bias", (total,), 0, start, self.bias[rows])
            begin += here

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [..., in] with all parts; returns [..., sum of this rank's rows], the parts one after another."""
        return F.linear(x, self.weight, self.bias)


class LinearColParallelMerged(Merged):
    """Column-parallel matrices, e.g. gate and up: this rank's rows of each matrix in ``names``, one after another."""

    def __init__(self, in_size: int, outs: Sequence[int], names: Sequence[str], ctx: Context, *, bias: bool = False):
        rank, size = ctx.comm.rank, ctx.comm.size
        here = [split_rows(out, size, f"{name} rows") for name, out in zip(names, outs, strict=True)]
        parts = [(name, out, rank * n, n) for name, out, n in zip(names, outs, here, strict=True)]
        super().__init__(in_size, parts, bias, ctx)


class LinearQKVMerged(Merged):
    """The query, key and value projections, split over the ranks by whole heads.

    If there are fewer KV heads than ranks, several ranks hold a copy of the same KV head (Ainslie et al., GQA, 2023).
    Raises `ConfigError` if the heads can't be split over the ranks.
    """

    def __init__(
        self,
        in_size: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        ctx: Context,
        *,
        bias: bool = False,
        names: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
    ):
        rank, size = ctx.comm.rank, ctx.comm.size
        self.q_heads = split_rows(q_heads, size, "query heads")
        if kv_heads % size and size % kv_heads:
            raise ConfigError(
                f"tp={size} can't share {kv_heads} kv heads: tp must divide that number or be a multiple of it."
            )
        self.kv_heads = max(1, kv_heads // size)
        first_kv = rank * kv_heads // size
        q = (names[0], q_heads * head_dim, rank * self.q_heads * head_dim, self.q_heads * head_dim)
        kv = [(name, kv_heads * head_dim, first_kv * head_dim, self.kv_heads * head_dim) for name in names[1:]]
        super().__init__(in_size, [q, *kv], bias, ctx)


class LinearRowParallel(nn.Module):
    """A matrix split by its input columns: each rank computes a partial sum of the output.

    With ``reduce`` the layer all-reduces the partial sums. Without ``reduce`` the caller must do so; `RMSNormFused`
    fuses the all-reduce with the norm. Only rank 0 adds the bias, so that the sum contains it once.
    """

    def __init__(self, in_size: int, out_size: int, ctx: Context, *, bias: bool = False, reduce: bool = True):
        super().__init__()
        self.comm, self.reduce = ctx.comm, reduce and ctx.comm.size > 1
        self.in_size = in_size
        self.weight = ctx.parameter(out_size, split_rows(in_size, ctx.comm.size, "row-parallel inputs"))
        self.bias = ctx.parameter(out_size) if bias else None

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Yield this rank's columns of the weight, and the whole bias."""
        out_size, here = self.weight.shape
        yield WeightShard.part(f"{prefix}weight", (out_size, self.in_size), 1, self.comm.rank * here, self.weight)
        if self.bias is not None:
            yield WeightShard.whole(f"{prefix}bias", self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [tokens, in / size]; returns [tokens, out], a partial sum unless the layer has ``reduce``."""
        y = F.linear(x, self.weight, self.bias if self.comm.rank == 0 else None)
        return self.comm.all_reduce(y) if self.reduce else y


def silu_and_mul(x: Tensor) -> Tensor:
    """Return silu(gate)·up [..., dim] for x [..., 2·dim]; the gate half comes first."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Return gelu(gate)·up [..., dim] for x [..., 2·dim]. ``approximate`` is torch's: "none" or "tanh"."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate).mul_(up)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_and_mul,
    "gelu": gelu_and_mul,
    "gelu_pytorch_tanh": partial(gelu_and_mul, approximate="tanh"),
}
"""Hugging Face's ``hidden_act`` → the gated activation: [..., 2·dim] → [..., dim]."""


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the gated activation for Hugging Face's ``hidden_act`` name. Raises ConfigError for an unknown name."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"hidden_act {name!r} is not supported: use {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


class GatedMLP(nn.Module):
    """down(act(gate(x))·up(x)), with the inner dimension split over the ranks. The output is a partial sum."""

    def __init__(self, hidden_size: int, inner_size: int, act: str, ctx: Context, *, bias: bool = False):
        super().__init__()
        names = ("gate_proj", "up_proj")
        self.gate_up_proj = LinearColParallelMerged(hidden_size, (inner_size,) * 2, names, ctx, bias=bias)
        self.act, self.act_name = activation(act), act
        self.down_proj = LinearRowParallel(inner_size, hidden_size, ctx, bias=bias, reduce=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the MLP of x [tokens, hidden]; returns a partial sum [tokens, hidden]."""
        out: Tensor = self.down_proj(self.act(self.gate_up_proj(x)))
        return out
