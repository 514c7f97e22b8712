"""The FP8 products on a GPU, compared with products in float64 of the same quantised numbers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from torch import Tensor

from minisgl.kernel import fp8
from minisgl.kernel.triton import fp8 as triton_fp8

SHAPES = [(128, 128), (200, 400), (72, 96), (384, 1040)]
"""Shapes [out, in] of weights, with smaller blocks at the edges."""


def weight_of(out: int, inner: int, generator: torch.Generator) -> fp8.Fp8Weight:
    """Return a random weight whose blocks have scales of different magnitudes."""
    device = generator.device
    wide = torch.randn((out, inner), generator=generator, device=device) * inner**-0.5
    wide *= torch.rand((out, 1), generator=generator, device=device) + 0.1
    weight = fp8.Fp8Weight(
        torch.empty((out, inner), dtype=fp8.E4M3, device=device),
        torch.empty((fp8.blocks(out), fp8.blocks(inner)), device=device),
    )
    fp8.quantize_weight(wide, weight)
    return weight


def rows_of(rows: int, inner: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return random rows that are not contiguous, with one group of zeros and one large element."""
    x = torch.randn((rows, 2 * inner), generator=generator, device=generator.device)[:, :inner]
    x[0, : fp8.BLOCK], x[-1, -1] = 0.0, 30.0
    return x.to(dtype)


def error(y: Tensor, expected: Tensor) -> float:
    """Return the relative error of the whole tensor, in the Frobenius norm."""
    return ((y.double() - expected).norm() / expected.norm()).item()


def exact(x: Tensor, weight: fp8.Fp8Weight, quantized: bool) -> Tensor:
    """Return the product in float64 of x, quantised or not, with the weight."""
    a = x.double()
    if quantized:
        values, factors = fp8.quantize_rows(x)
        a = values.double() * factors.double().repeat_interleave(fp8.BLOCK, 1)[:, : x.shape[1]]
    return a @ fp8.dequantize(weight).double().T


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest relative error: that of rounding the result to ``dtype``, or of sums in float32."""
    return {torch.float32: 2e-4, torch.float16: 1e-3, torch.bfloat16: 4e-3}[dtype]


@pytest.mark.parametrize(("out", "inner"), SHAPES)
def test_one_row(out: int, inner: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    x, weight = rows_of(1, inner, dtype, generator), weight_of(out, inner, generator)
    assert error(triton_fp8.one_row(x, weight), exact(x, weight, False)) < tolerance(dtype)


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize(("out", "inner"), SHAPES)
def test_few_rows(rows: int, out: int, inner: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    x, weight = rows_of(rows, inner, dtype, generator), weight_of(out, inner, generator)
    assert error(triton_fp8.few_rows(x, weight), exact(x, weight, False)) < tolerance(dtype)


@pytest.mark.parametrize(("rows", "inner"), [(1, 128), (3, 400), (2, 2000)])
def test_quantize_rows(rows: int, inner: int, dtype: torch.dtype, generator: torch.Generator, compiled: bool) -> None:
    """Equal to the torch reference, bit for bit."""
    x = rows_of(rows, inner, dtype, generator)
    values, factors = triton_fp8.quantize_rows(x)
    expected, expected_factors = fp8.quantize_rows(x)
    assert torch.equal(factors, expected_factors)
    bits, expected_bits = values.view(torch.uint8).int(), expected.view(torch.uint8).int()
    if compiled:
        assert torch.equal(bits, expected_bits)
        return
    # The interpreter rounds halves up, and loses a carry: numbers rounded up to a power of two become half of it.
    assert (bits == expected_bits).float().mean() > 0.9
    assert ((bits - expected_bits).abs() <= 1)[expected_bits & 7 != 0].all()


@pytest.mark.parametrize("rows", [1, 33, 130])
@pytest.mark.parametrize(("out", "inner"), SHAPES)
def test_many_rows(
    rows: int, out: int, inner: int, dtype: torch.dtype, generator: torch.Generator, compiled: bool
) -> None:
    x, weight = rows_of(rows, inner, dtype, generator), weight_of(out, inner, generator)
    y = triton_fp8.product(*fp8.quantize_rows(x), weight, dtype)
    assert error(y, exact(x, weight, True)) < max(tolerance(dtype), 1e-3)
    if compiled:
        assert torch.equal(triton_fp8.many_rows(x, weight), y)
