"""Linear layers cut over the tensor-parallel ranks: by output (column) or by input (row).

Shoeybi et al., Megatron-LM, 2019. Merged layers hold several of the checkpoint's matrices as one, so that one matrix
product serves them all; the checkpoint's parts stand beside the merged layer under their own names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from minisgl.config import ConfigError
from minisgl.kernel.linear import Packed, linear, pack
from minisgl.layers.context import Context
from minisgl.layers.weight_shards import WeightShard, split_rows


def _parameter(ctx: Context, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=ctx.dtype, device=ctx.device), requires_grad=False)


class _Merged(nn.Module):
    """Several column-parallel matrices over the same input. ``parts``: (name, all rows, first row here, rows here)."""

    def __init__(self, in_size: int, parts: Sequence[tuple[str, int, int, int]], bias: bool, ctx: Context):
        super().__init__()
        self.parts = tuple(parts)
        rows = sum(here for *_, here in parts)
        self.weight = _parameter(ctx, rows, in_size)
        self.bias = _parameter(ctx, rows) if bias else None
        self.packed: Packed | None = None

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        beside = prefix[:-1].rpartition(".")[0]
        begin = 0
        for name, total, start, here in self.parts:
            full = f"{beside}.{name}" if beside else name
            rows = slice(begin, begin + here)
            yield WeightShard.part(f"{full}.weight", (total, self.weight.shape[1]), 0, start, self.weight[rows])
            if self.bias is not None:
                yield WeightShard.part(f"{full}.bias", (total,), 0, start, self.bias[rows])
            begin += here

    def after_load(self) -> None:
        self.packed = pack(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → [..., the parts' rows here, in order]."""
        return linear(x, self.weight, self.bias, self.packed)


class LinearColParallelMerged(_Merged):
    """Matrices ``names`` (gate and up), each cut by its output rows: this rank's share of each, one after another."""

    def __init__(self, in_size: int, outs: Sequence[int], names: Sequence[str], ctx: Context, *, bias: bool = False):
        rank, size = ctx.comm.rank, ctx.comm.size
        here = [split_rows(out, size, f"{name} rows") for name, out in zip(names, outs, strict=True)]
        parts = [(name, out, rank * n, n) for name, out, n in zip(names, outs, here, strict=True)]
        super().__init__(in_size, parts, bias, ctx)


class LinearQKVMerged(_Merged):
    """Query, key and value projections. Whole heads go to ranks; where there are fewer kv heads than ranks, several
    ranks hold a copy of the same one (Ainslie et al., GQA, 2023)."""

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
                f"tp={size} can't share {kv_heads} kv heads: it must divide them or be a multiple of them."
            )
        self.kv_heads = max(1, kv_heads // size)
        first_kv = rank * kv_heads // size
        q = (names[0], q_heads * head_dim, rank * self.q_heads * head_dim, self.q_heads * head_dim)
        kv = [(name, kv_heads * head_dim, first_kv * head_dim, self.kv_heads * head_dim) for name in names[1:]]
        super().__init__(in_size, [q, *kv], bias, ctx)


class LinearRowParallel(nn.Module):
    """A matrix cut by its input columns: each rank has a partial sum. ``reduce`` sums it here; without, the caller
    does (`RMSNormFused` together with the norm). The bias counts once, on rank 0."""

    def __init__(self, in_size: int, out_size: int, ctx: Context, *, bias: bool = False, reduce: bool = True):
        super().__init__()
        self.comm, self.reduce = ctx.comm, reduce and ctx.comm.size > 1
        self.in_size = in_size
        self.weight = _parameter(ctx, out_size, split_rows(in_size, ctx.comm.size, "row-parallel inputs"))
        self.bias = _parameter(ctx, out_size) if bias else None
        self.packed: Packed | None = None

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        out_size, here = self.weight.shape
        yield WeightShard.part(f"{prefix}weight", (out_size, self.in_size), 1, self.comm.rank * here, self.weight)
        if self.bias is not None:
            yield WeightShard.whole(f"{prefix}bias", self.bias)

    def after_load(self) -> None:
        self.packed = pack(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, in / size] → [tokens, out], a partial sum unless ``reduce``."""
        x = linear(x, self.weight, self.bias if self.comm.rank == 0 else None, self.packed)
        return self.comm.all_reduce(x) if self.reduce else x
