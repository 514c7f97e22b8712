"""Linear layers split over the tensor-parallel ranks: by output (column-parallel) or by input (row-parallel).

Shoeybi et al., Megatron-LM, 2019. A merged layer stores several of the checkpoint's matrices as one matrix, so that one
matrix product computes them all. When loading, each part has the checkpoint's own name: ``self_attn.qkv_proj`` is
filled from ``self_attn.q_proj``, ``k_proj`` and ``v_proj``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from minisgl.config import ConfigError
from minisgl.layers.context import Context
from minisgl.layers.fp8 import Fp8Matrix
from minisgl.layers.weight_shards import WeightShard, split_rows
from minisgl.plugins.kernels.ops import huge_pages
from minisgl.plugins.kernels.ops.fp8 import QuantizedRows
from minisgl.plugins.kernels.ops.linear import Packed, linear, pack


def _parameter(ctx: Context, *shape: int) -> nn.Parameter:
    return nn.Parameter(huge_pages.empty(shape, ctx.dtype, ctx.device), requires_grad=False)


def _wide(fp8: Fp8Matrix) -> nn.Parameter:
    """Return a weight in the dtype of activations, in place of the FP8 matrix of a layer that is not stored in FP8."""
    shape = tuple(fp8.values.shape)
    return nn.Parameter(huge_pages.empty(shape, fp8.dtype, fp8.values.device), requires_grad=False)


class _Merged(nn.Module):
    """Several column-parallel matrices with the same input, stored as one matrix.

    ``parts`` lists for each matrix (name, rows in the checkpoint, this rank's first row, number of this rank's rows).
    """

    def __init__(self, in_size: int, parts: Sequence[tuple[str, int, int, int]], bias: bool, ctx: Context):
        super().__init__()
        self.parts = tuple(parts)
        rows = [here for *_, here in parts]
        self.fp8 = None if ctx.fp8 is None else Fp8Matrix(rows, in_size, ctx.fp8, ctx.dtype, ctx.device)
        self.weight = _parameter(ctx, sum(rows), in_size) if self.fp8 is None else self.fp8.values
        self.bias = _parameter(ctx, sum(rows)) if bias else None
        self.packed: Packed | None = None

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Yield this rank's rows of each part, under the part's name beside the merged layer.

        The layer is in FP8 only if all parts are: see `Fp8.serves`.
        """
        beside = prefix[:-1].rpartition(".")[0]
        full_names = [f"{beside}.{name}" if beside else name for name, *_ in self.parts]
        if self.fp8 is not None and not self.fp8.fp8.serves([f"{full}.weight" for full in full_names], names):
            self.weight, self.fp8 = _wide(self.fp8), None
        begin = 0
        for full, (_, total, start, here) in zip(full_names, self.parts, strict=True):
            rows, shape = slice(begin, begin + here), (total, self.weight.shape[1])
            if self.fp8 is None:
                yield WeightShard.part(f"{full}.weight", shape, 0, start, self.weight[rows])
            else:
                yield from self.fp8.shards(f"{full}.weight", shape, 0, start, self.fp8.part(begin, here), names)
            if self.bias is not None:
                yield WeightShard.part(f"{full}.bias", (total,), 0, start, self.bias[rows])
            begin += here

    def after_load(self) -> None:
        """Pack the loaded weight for a CPU, if that is faster: see `minisgl.plugins.kernels.ops.linear.pack`."""
        self.packed = pack(self.weight) if self.fp8 is None else None

    def takes_quantized(self, rows: int) -> bool:
        """Return whether `forward` takes ``rows`` rows as `QuantizedRows`."""
        return self.fp8 is not None and self.fp8.takes_quantized(rows)

    def forward(self, x: Tensor | QuantizedRows) -> Tensor:
        """Multiply x [..., in] with all parts; returns [..., sum of this rank's rows], the parts one after another.

        In FP8, x must be [tokens, in], or `QuantizedRows` if `takes_quantized`.
        """
        if self.fp8 is not None:
            return self.fp8(x, self.bias)  # type: ignore[no-any-return]
        assert isinstance(x, Tensor)
        return linear(x, self.weight, self.bias, self.packed)


class LinearColParallelMerged(_Merged):
    """Column-parallel matrices, e.g. gate and up: this rank's rows of each matrix in ``names``, one after another."""

    def __init__(self, in_size: int, outs: Sequence[int], names: Sequence[str], ctx: Context, *, bias: bool = False):
        rank, size = ctx.comm.rank, ctx.comm.size
        here = [split_rows(out, size, f"{name} rows") for name, out in zip(names, outs, strict=True)]
        parts = [(name, out, rank * n, n) for name, out, n in zip(names, outs, here, strict=True)]
        super().__init__(in_size, parts, bias, ctx)


class LinearQKVMerged(_Merged):
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
        here = split_rows(in_size, ctx.comm.size, "row-parallel inputs")
        self.fp8 = None if ctx.fp8 is None else Fp8Matrix([out_size], here, ctx.fp8, ctx.dtype, ctx.device)
        self.weight = _parameter(ctx, out_size, here) if self.fp8 is None else self.fp8.values
        self.bias = _parameter(ctx, out_size) if bias else None
        self.packed: Packed | None = None

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Yield this rank's columns of the weight, and the whole bias. For FP8, see `Fp8.serves`."""
        if self.fp8 is not None and not self.fp8.fp8.serves([f"{prefix}weight"], names):
            self.weight, self.fp8 = _wide(self.fp8), None
        out_size, here = self.weight.shape
        shape, start = (out_size, self.in_size), self.comm.rank * here
        if self.fp8 is None:
            yield WeightShard.part(f"{prefix}weight", shape, 1, start, self.weight)
        else:
            yield from self.fp8.shards(f"{prefix}weight", shape, 1, start, self.fp8.part(0, out_size), names)
        if self.bias is not None:
            yield WeightShard.whole(f"{prefix}bias", self.bias)

    def after_load(self) -> None:
        """Pack the loaded weight for a CPU, if that is faster: see `minisgl.plugins.kernels.ops.linear.pack`."""
        self.packed = pack(self.weight) if self.fp8 is None else None

    def takes_quantized(self, rows: int) -> bool:
        """Return whether `forward` takes ``rows`` rows as `QuantizedRows`."""
        return self.fp8 is not None and self.fp8.takes_quantized(rows)

    def forward(self, x: Tensor | QuantizedRows) -> Tensor:
        """Multiply x [tokens, in / size]; returns [tokens, out], a partial sum unless the layer has ``reduce``.

        x may be `QuantizedRows` if `takes_quantized`.
        """
        bias = self.bias if self.comm.rank == 0 else None
        if self.fp8 is not None:
            y: Tensor = self.fp8(x, bias)
        else:
            assert isinstance(x, Tensor)
            y = linear(x, self.weight, bias, self.packed)
        return self.comm.all_reduce(y) if self.reduce else y
