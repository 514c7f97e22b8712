"""Matrices of integers of 4 or 8 bits with a scale for each group of columns, and their product on a CPU.

A number of a `GroupedWeight` is q · scale, or with minimums q · scale + minimum. The integer q has 8 bits and a sign,
or 4 bits: then it is 0 to 15 with minimums, and -8 to 7 without. A group has 32 columns, or 16 with 8 bits.

The product quantises x too: a block of 32 columns of a row becomes integers of 8 bits with one scale, the largest
absolute value / 127. ggml calls this type Q8_0, and llama.cpp computes with it. So the products of a block are sums of
integers. `grouped_linear_torch` is the reference, and `minisgl.plugins.kernels.ops.cpp.grouped` the fast product.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.plugins.kernels.ops import huge_pages
from minisgl.plugins.kernels.ops.cpp import grouped as cpp

__all__ = [
    "Form",
    "GroupedWeight",
    "Parts",
    "dequantize",
    "grouped_linear",
    "grouped_linear_torch",
    "join",
    "pack",
    "quantize",
    "row_slices",
]

BLOCK = 32
"""Columns of a block of x, and of a block of a panel."""
OUTPUTS = 16
"""Outputs (rows of the weight) of a panel."""
_arena = huge_pages.Arena(32 << 20)
_CHUNK = 1 << 22
"""About this number of integers is rearranged or dequantised at a time."""


class Form(NamedTuple):
    """How a weight is stored: ``bits`` of an integer, columns of a ``group``, and whether there are ``mins``."""

    bits: int
    group: int = BLOCK
    mins: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of 32 columns and 16 outputs."""
        return OUTPUTS * (BLOCK * self.bits // 8 + 2 * BLOCK // self.group + 2 * self.mins)


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A matrix [outputs, columns] in panels of 16 outputs, which are padded with zeros.

    ``panels`` is [panels, blocks of 32 columns, `Form.block_bytes`], uint8. A block has, for each 4 columns and each of
    the 16 outputs, 4 bytes: one for each column or, with 4 bits, for two columns, 16 apart, the first in the lower
    half. Then it has the scales [groups, outputs], and the minimums [outputs], in float16.
    """

    form: Form
    outputs: int
    columns: int
    panels: Tensor


Parts = tuple[Tensor, Tensor, Tensor | None]
"""Some rows of a matrix: integers [rows, blocks, bytes], uint8, scales [rows, blocks, groups], mins [rows, blocks].

With 8 bits, a block's bytes are its 32 columns. With 4 bits, byte i has column i in its lower half and column 16 + i in
its upper half. Scales and mins are rounded to float16.
"""


def row_slices(begin: int, end: int, columns: int) -> Iterator[slice]:
    """Divide rows into slices for `pack`, of about `_CHUNK` numbers and of whole panels."""
    step = max(1, _CHUNK // (OUTPUTS * columns)) * OUTPUTS
    for start in range(begin, end, step):
        yield slice(start, min(start + step, end))


def pack(form: Form, outputs: int, columns: int, rows: Iterable[Parts]) -> GroupedWeight:
    """Return the weight [outputs, columns] whose rows are all ``rows`` one after another: those of `row_slices`.

    They are read one by one, so that only some of them need to be in memory at a time.
    """
    count, blocks, groups, size = -(-outputs // OUTPUTS), columns // BLOCK, BLOCK // form.group, BLOCK * form.bits // 8
    panels = huge_pages.empty((count, blocks, form.block_bytes), torch.uint8, torch.device("cpu"))
    values, begin = size * OUTPUTS, 0
    halves = panels[:, :, values:].view(torch.float16).view(count, blocks, -1, OUTPUTS)
    for integers, scales, mins in rows:
        part = slice(begin, begin + -(-len(integers) // OUTPUTS))
        to = panels[part, :, :values].view(-1, blocks, size // 4, OUTPUTS, 4)
        to.copy_(_in_panels(integers).view(-1, OUTPUTS, blocks, size // 4, 4).permute(0, 2, 3, 1, 4))
        to_halves, begin = halves[part], part.stop
        to_halves[:, :, :groups] = _in_panels(scales).view(-1, OUTPUTS, blocks, groups).permute(0, 2, 3, 1)
        if mins is not None:
            to_halves[:, :, groups] = _in_panels(mins).view(-1, OUTPUTS, blocks).permute(0, 2, 1)
    return GroupedWeight(form, outputs, columns, panels)


def _in_panels(rows: Tensor) -> Tensor:
    """Append rows of zeros to ``rows``, so that their number is a multiple of 16."""
    missing = -len(rows) % OUTPUTS
    return torch.cat((rows, rows.new_zeros((missing, *rows.shape[1:])))) if missing else rows.contiguous()


def join(weights: list[GroupedWeight]) -> list[GroupedWeight]:
    """Return one weight with the outputs of all ``weights``, if they have the same form and whole panels, else them.

    The result is in huge pages, small weights side by side.
    """
    first = weights[0]
    if any(w.form != first.form for w in weights) or any(w.outputs % OUTPUTS for w in weights[:-1]):
        return [joined for weight in weights for joined in join([weight])]
    panels = [weight.panels for weight in weights]
    if len(panels) == 1 and panels[0].nbytes >= huge_pages.HUGE_PAGE:
        return weights
    shape = (sum(map(len, panels)), *panels[0].shape[1:])
    joined = torch.cat(panels, out=_arena.empty(shape, torch.uint8))
    return [GroupedWeight(first.form, sum(w.outputs for w in weights), first.columns, joined)]


def quantize(weight: Tensor, bits: int) -> GroupedWeight:
    """Quantise weight [outputs, columns] as ggml's types Q8_0 and Q4_0 do: the columns are a multiple of 32.

    The number with the largest absolute value of a group becomes ±127, or with 4 bits -8.
    """

    def quantized(rows: Tensor) -> Parts:
        groups = rows.float().view(len(rows), -1, BLOCK)
        largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
        scale = largest.abs() / 127 if bits == 8 else largest / -8
        q = groups * torch.where(scale == 0, 0, 1 / scale)
        if bits == 8:
            return q.round().to(torch.int8).view(torch.uint8), scale, None
        low, high = (q + 8.5).clamp(0, 15).to(torch.uint8).chunk(2, dim=2)
        return low | (high << 4), scale, None

    slices = row_slices(0, *weight.shape)
    outputs, columns = weight.shape
    return pack(Form(bits), outputs, columns, (quantized(weight[rows]) for rows in slices))


def stored(weight: GroupedWeight, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return what ``rows`` [n] store, in float32: integers [n, groups, columns], scales [n, groups], mins [n, blocks].

    The groups are those of all columns.
    """
    form, (count, blocks, _) = weight.form, weight.panels.shape
    panel, output, size = rows // OUTPUTS, rows % OUTPUTS, BLOCK * form.bits // 8
    values = weight.panels[:, :, : OUTPUTS * size].view(count, blocks, -1, OUTPUTS, 4)
    integers = values[panel, :, :, output].reshape(len(rows), blocks, size)
    if form.bits == 4:
        integers = torch.cat((integers & 15, integers >> 4), dim=2).float()
        integers = integers if form.mins else integers - 8
    halves = weight.panels[:, :, OUTPUTS * size :].view(torch.float16).view(count, blocks, -1, OUTPUTS)
    halves = halves[panel, :, :, output].float()
    scales, mins = halves[:, :, : BLOCK // form.group], halves[:, :, -1] if form.mins else None
    numbers = integers if form.bits == 4 else integers.view(torch.int8).float()
    return numbers.view(len(rows), -1, form.group), scales.flatten(1), mins


def dequantize(weight: GroupedWeight, rows: Tensor) -> Tensor:
    """Return the numbers of ``rows`` [n] of the weight: [n, columns] float32."""
    integers, scales, mins = stored(weight, rows)
    numbers = (integers * scales.unsqueeze(2)).view(len(rows), -1, BLOCK)
    return (numbers if mins is None else numbers + mins.unsqueeze(2)).flatten(1)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the integers [rows, blocks, 32] and the scales [rows, blocks] of x [rows, columns], both in float32."""
    blocks = x.float().view(len(x), -1, BLOCK)
    largest = blocks.abs().amax(2)
    inverse = torch.where(largest > 0, 127 / largest, 0)
    return (blocks * inverse.unsqueeze(2)).round(), largest / 127


def grouped_linear_torch(x: Tensor, weight: GroupedWeight, bias: Tensor | None = None) -> Tensor:
    """Compute `grouped_linear` in plain torch: the sums of integers are exact, and added in the order of columns."""
    group, form = weight.form.group, weight.form
    integers, factors = quantize_rows(x)
    integers, x_scales = integers.view(len(x), -1, group), factors.repeat_interleave(BLOCK // group, 1)
    parts = []
    for rows in torch.arange(weight.outputs).split(max(1, _CHUNK // weight.columns)):
        q, scales, mins = stored(weight, rows)
        total = torch.zeros(len(x), len(rows))
        for g in range(q.shape[1]):
            total += x_scales[:, g, None] * scales[:, g] * (integers[:, g] @ q[:, g].T)
            if form.mins and mins is not None:
                total += (factors[:, g] * integers[:, g].sum(1))[:, None] * mins[:, g]
        parts.append(total)
    out = torch.cat(parts, dim=1)
    return (out if bias is None else out + bias.float()).to(x.dtype)


def grouped_linear(x: Tensor, weight: GroupedWeight, bias: Tensor | None = None) -> Tensor:
    """Return x·weightᵀ + bias in x's dtype: x [rows, columns], bias [outputs] → [rows, outputs]."""
    if cpp.serves(x):
        return cpp.grouped_linear(x, weight.panels, weight.form, weight.outputs, bias)
    return grouped_linear_torch(x, weight, bias)
