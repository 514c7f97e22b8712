"""Quantised types of ggml as a `GroupedWeight`: the same integers in another order, with scales in float16.

Q8_0, Q4_0 and Q4_1 keep their numbers exactly. The products of two scales that Q4_K and Q6_K have are rounded to
float16. Q6_K is stored with 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from minisgl.plugins.kernels.ops.grouped import Form, GroupedWeight, Parts, pack
from minisgl.plugins.quantization.ggml.types import q4_k_parts, q6_k_parts

__all__ = ["FORMS", "grouped"]

FORMS = {"Q8_0": Form(8), "Q4_0": Form(4), "Q4_1": Form(4, mins=True), "Q4_K": Form(4, mins=True), "Q6_K": Form(8, 16)}
"""Type → the form of its weights. The others have no integers."""


def grouped(name: str, outputs: int, columns: int, rows: Iterable[Tensor]) -> GroupedWeight:
    """Return the weight [outputs, columns] of the type ``name``. ``rows`` are [rows, bytes], uint8: see `pack`.

    Raises ValueError if float16 can't hold a scale.
    """
    return pack(FORMS[name], outputs, columns, (_parts(name, data, columns // 32) for data in rows))


def _parts(name: str, data: Tensor, blocks: int) -> Parts:
    mins: Tensor | None = None
    if name == "Q4_K":
        integers, scales, mins = _q4_k(data, blocks)
    elif name == "Q6_K":
        q, scale = q6_k_parts(data.contiguous())
        integers, scales = q.view(torch.uint8).view(-1, blocks, 32), scale.half().view(-1, blocks, 2)
    else:
        block = data.unflatten(1, (blocks, -1))
        at = 4 if FORMS[name].mins else 2
        integers, scales = block[:, :, at:], _half(block, 0).unsqueeze(2)
        mins = _half(block, 2) if FORMS[name].mins else None
    if not scales.isfinite().all() or (mins is not None and not mins.isfinite().all()):
        raise ValueError("float16 can't hold its scales")
    return integers, scales, mins


def _q4_k(data: Tensor, blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return integers [rows, blocks, 16], scales [rows, blocks, 1] and minimums [rows, blocks], which are added."""
    q, scale, least = q4_k_parts(data.contiguous())
    return (
        (q[:, :, :16] | (q[:, :, 16:] << 4)).view(-1, blocks, 16),
        scale.half().view(-1, blocks, 1),
        -least.half().view(-1, blocks),
    )


def _half(block: Tensor, begin: int) -> Tensor:
    """Return the float16 number at byte ``begin`` of each block: [rows, blocks]."""
    return block[:, :, begin : begin + 2].contiguous().view(torch.float16).squeeze(2)
