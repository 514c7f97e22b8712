"""The torch reference of FP8: quantisation block by block, and the product of quantised numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from minisgl.plugins.kernels.ops import fp8


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def quantized(wide: Tensor) -> fp8.Fp8Weight:
    """Quantise a matrix into tensors that are full of NaN."""
    out, inner = wide.shape
    scale_inv = torch.full((fp8.blocks(out), fp8.blocks(inner)), torch.nan)
    weight = fp8.Fp8Weight(torch.full((out, inner), torch.nan).to(fp8.E4M3), scale_inv)
    fp8.quantize_weight(wide, weight)
    return weight


def test_same_blocks_as_transformers(generator: torch.Generator) -> None:
    """Values and scales are those of transformers' fine-grained FP8, but for the rounding of reciprocals."""
    pytest.importorskip("transformers")
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    config = SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    quantizer = SimpleNamespace(quantization_config=config)
    wide = torch.randn(384, 256, generator=generator) * torch.rand(384, 1, generator=generator)
    expected = Fp8Quantize(quantizer).convert({"x.weight": wide})
    weight = quantized(wide)
    torch.testing.assert_close(weight.scale_inv, expected["x.weight_scale_inv"], rtol=1e-6, atol=0)
    same = weight.values.view(torch.uint8) == expected["x.weight"].view(torch.uint8)
    assert same.float().mean() > 0.999
    stored = {"weight": [expected["x.weight"]], "weight_scale_inv": [expected["x.weight_scale_inv"]]}
    dequantized = Fp8Dequantize(quantizer).convert(stored)["weight"]
    ours = fp8.dequantize(fp8.Fp8Weight(expected["x.weight"], expected["x.weight_scale_inv"]))
    torch.testing.assert_close(ours, dequantized, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (200, 300), (70, 513)])
def test_every_block_uses_the_range_of_e4m3(shape: tuple[int, int], generator: torch.Generator) -> None:
    """Each block, also a smaller one at an edge, has an element of 448, and errors of at most half a step."""
    wide = torch.randn(shape, generator=generator)
    weight = quantized(wide)
    restored = fp8.dequantize(weight)
    for i in range(0, shape[0], 128):
        for j in range(0, shape[1], 128):
            block = (slice(i, i + 128), slice(j, j + 128))
            assert weight.values[block].float().abs().max() == 448
            scale = wide[block].abs().max() / 448
            assert weight.scale_inv[i // 128, j // 128].item() == pytest.approx(scale.item(), rel=1e-6)
            # 3 bits of mantissa: half a step is 1/16 of a number's power of two, or 2⁻¹⁰ below the smallest power.
            bound = torch.maximum(wide[block].abs() / 16, scale * 2**-10) * 1.001
            assert ((restored - wide)[block].abs() <= bound).all()


def test_zeros() -> None:
    weight = quantized(torch.zeros(130, 5))
    assert fp8.dequantize(weight).eq(0).all()
    assert weight.scale_inv.eq(1).all()
    rows = fp8.quantize_rows(torch.zeros(2, 200))
    assert rows.values.float().eq(0).all()
    assert rows.factors.eq(1).all()


def test_rows_are_quantised_in_groups(generator: torch.Generator) -> None:
    """A large element costs precision only in its own group of 128 columns of its own row."""
    x = torch.randn(3, 300, generator=generator)
    rows = fp8.quantize_rows(x)
    large = x.clone()
    large[1, 130] = 1000.0
    others = fp8.quantize_rows(large)
    changed = rows.values.view(torch.uint8) != others.values.view(torch.uint8)
    assert changed[1, 128:256].any()
    changed[1, 128:256] = False
    assert not changed.any()
    assert (rows.factors != others.factors).nonzero().tolist() == [[1, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product(dtype: torch.dtype, generator: torch.Generator) -> None:
    """The product is that of the quantised numbers, block by block, in float64."""
    x, weight = (
        torch.randn(5, 300, generator=generator).to(dtype),
        quantized(torch.randn(150, 300, generator=generator)),
    )
    rows = fp8.quantize_rows(x)
    expected = torch.zeros(5, 150, dtype=torch.float64)
    for group in range(3):
        k = slice(group * 128, (group + 1) * 128)
        for block in range(2):
            n = slice(block * 128, (block + 1) * 128)
            part = rows.values[:, k].double() @ weight.values[n, k].double().T
            expected[:, n] += part * rows.factors[:, group, None].double() * weight.scale_inv[block, group].double()
    y = fp8.fp8_linear_torch(x, weight)
    assert y.dtype == dtype
    assert torch.equal(fp8.fp8_linear_torch(rows, weight), y)
    torch.testing.assert_close(y.double(), expected, atol=1e-4 if dtype == torch.float32 else 0.1, rtol=5e-3)


def test_nan_is_not_hidden() -> None:
    x = torch.ones(2, 256)
    x[1, 200] = torch.nan
    y = fp8.fp8_linear_torch(x, quantized(torch.ones(3, 256)))
    assert y[0].isfinite().all()
    assert y[1].isnan().all()
