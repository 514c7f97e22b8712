"""The core's layers with matrices in FP8: linear layers, and the MLP and norms that quantise what they pass to them.

A linear layer becomes a plain one again when it is loaded from a checkpoint that has some of its weights in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from minisgl.layers.attention import AttentionLayer
from minisgl.layers.linear import LinearColParallelMerged, LinearQKVMerged, LinearRowParallel
from minisgl.layers.weight_shards import WeightShard
from minisgl.plugins.kernels.attention import attend_quantized
from minisgl.plugins.kernels.converted.layers import FastMLP, FastNormFused
from minisgl.plugins.kernels.ops import huge_pages
from minisgl.plugins.kernels.ops.activation import ACTS, act_and_mul, act_and_mul_quantized
from minisgl.plugins.kernels.ops.fp8 import QuantizedRows
from minisgl.plugins.kernels.ops.gated import gated_linear
from minisgl.plugins.kernels.ops.norm import rms_norm_quantized
from minisgl.plugins.quantization.e4m3.matrix import Fp8, Fp8Matrix

__all__ = ["LINEAR", "Fp8AttentionLayer", "Fp8Linear", "Fp8MLP", "Fp8NormFused"]


class Fp8Linear(nn.Module):
    """What linear layers in FP8 have in common. ``plain`` is the class of the layer with weights in 16 bits."""

    weights_in: ClassVar[str] = "FP8"
    plain: ClassVar[type[nn.Module]]
    fp8: Fp8Matrix
    weight: nn.Parameter

    def rows(self) -> list[int]:
        """Return the numbers of rows of the matrices that the layer consists of."""
        return [len(self.weight)]

    def start(self, fp8: Fp8, dtype: torch.dtype, device: torch.device) -> None:
        """Replace the weight by a matrix in FP8 on ``device``."""
        self.fp8 = Fp8Matrix(self.rows(), self.weight.shape[1], fp8, dtype, device)
        self.weight = self.fp8.values

    def become_plain(self) -> Any:
        """Return this layer, with weights in 16 bits from now on."""
        values = self.fp8.values
        weight = huge_pages.empty(tuple(values.shape), self.fp8.dtype, values.device)
        del self.fp8
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.__class__ = self.plain  # type: ignore[assignment]
        return self

    def takes_quantized(self, rows: int) -> bool:
        """Return whether `forward` takes ``rows`` rows as `QuantizedRows`."""
        return self.fp8.takes_quantized(rows)


class Fp8Merged(Fp8Linear):
    """A merged column-parallel layer in FP8."""

    parts: tuple[tuple[str, int, int, int], ...]
    bias: nn.Parameter | None
    full_names: Callable[[str], list[str]]

    def rows(self) -> list[int]:
        """Return the number of this rank's rows of each part."""
        return [here for *_, here in self.parts]

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Yield this rank's rows of each part. The layer is in FP8 only if all parts are: see `Fp8.serves`."""
        full_names = self.full_names(prefix)
        if not self.fp8.fp8.serves([f"{full}.weight" for full in full_names], names):
            yield from self.become_plain().weight_shards(prefix, names)
            return
        begin = 0
        for full, (_, total, start, here) in zip(full_names, self.parts, strict=True):
            shape = (total, self.weight.shape[1])
            yield from self.fp8.shards(f"{full}.weight", shape, 0, start, self.fp8.part(begin, here), names)
            if self.bias is not None:
                yield WeightShard.part(f"{full}.bias", (total,), 0, start, self.bias[begin : begin + here])
            begin += here

    def forward(self, x: Tensor | QuantizedRows) -> Tensor:
        """Multiply x [tokens, in] with all parts; returns [tokens, sum of this rank's rows]."""
        return self.fp8(x, self.bias)  # type: ignore[no-any-return]


class Fp8ColParallelMerged(Fp8Merged, LinearColParallelMerged):
    """`LinearColParallelMerged` in FP8."""

    plain = LinearColParallelMerged


class Fp8QKVMerged(Fp8Merged, LinearQKVMerged):
    """`LinearQKVMerged` in FP8."""

    plain = LinearQKVMerged


class Fp8RowParallel(Fp8Linear, LinearRowParallel):
    """`LinearRowParallel` in FP8."""

    plain = LinearRowParallel

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Yield this rank's columns of the weight, and the whole bias."""
        if not self.fp8.fp8.serves([f"{prefix}weight"], names):
            yield from self.become_plain().weight_shards(prefix, names)
            return
        out_size, here = self.weight.shape
        shape, start = (out_size, self.in_size), self.comm.rank * here
        yield from self.fp8.shards(f"{prefix}weight", shape, 1, start, self.fp8.part(0, out_size), names)
        if self.bias is not None:
            yield WeightShard.whole(f"{prefix}bias", self.bias)

    def forward(self, x: Tensor | QuantizedRows) -> Tensor:
        """Multiply x [tokens, in / size]; returns [tokens, out], a partial sum unless the layer has ``reduce``."""
        y: Tensor = self.fp8(x, self.bias if self.comm.rank == 0 else None)
        return self.comm.all_reduce(y) if self.reduce else y


KINDS: tuple[type[Fp8Linear], ...] = (Fp8ColParallelMerged, Fp8QKVMerged, Fp8RowParallel)
LINEAR = {kind.plain: kind for kind in KINDS}
"""The core's linear layers → the same in FP8."""


class Fp8MLP(FastMLP):
    """`GatedMLP` of which at least one product is in FP8."""

    def inner(self, x: Tensor | QuantizedRows) -> Tensor | QuantizedRows:
        """Return act(gate(x))·up(x), quantised if the down projection takes that."""
        merged, down, act = self.gate_up_proj, self.down_proj, ACTS[self.act_name]
        if merged.bias is None and isinstance(merged, Fp8Linear):
            inner = merged.fp8.forward_gated(x, act)
            if inner is not None:
                return inner
        elif merged.bias is None and isinstance(x, Tensor):
            inner = gated_linear(x, merged.weight, act)
            if inner is not None:
                return inner
        if isinstance(down, Fp8Linear) and down.takes_quantized(len(x)):
            return act_and_mul_quantized(merged(x), act)
        return act_and_mul(merged(x), act)


class Fp8AttentionLayer(AttentionLayer):
    """`AttentionLayer` whose output projection is in FP8: the backend's last launch may quantise the result."""

    def forward(
        self,
        x: Tensor | QuantizedRows,
        cos_sin: Tensor,
        out_cache_loc: Tensor,
        logits_indices: Tensor | None = None,
    ) -> Tensor:
        """Compute attention of x [tokens, hidden]: see `AttentionLayer.forward`."""
        qkv, o_proj = self.qkv_proj(x), self.o_proj
        out: Any = None
        if logits_indices is None and isinstance(o_proj, Fp8Linear) and o_proj.takes_quantized(len(qkv)):
            out = attend_quantized(self.ctx.attention, self.spec, qkv, self.norm, cos_sin, out_cache_loc)
        if out is None:
            out = self.attend(qkv, cos_sin, out_cache_loc)
        projected: Tensor = o_proj(out if logits_indices is None else out.index_select(0, logits_indices))
        return projected


class Fp8NormFused(FastNormFused):
    """`RMSNormFused` before a product in FP8. ``takes_quantized`` says for which numbers of tokens to quantise."""

    takes_quantized: Callable[[int], bool]

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor | QuantizedRows, Tensor]:
        """Return ``(norm(x + residual), x + residual)``, the first quantised if the next product takes that."""
        if (residual is None or self.comm is None) and self.takes_quantized(len(x)):
            return rms_norm_quantized(x, residual, self.weight, self.eps)
        return super().forward(x, residual)
