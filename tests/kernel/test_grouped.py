"""The product with integers of 4 and 8 bits, compared with plain torch and with the dequantised weights."""

from __future__ import annotations

import pytest
import torch

from minisgl.plugins.kernels.ops.cpp import grouped as cpp
from minisgl.plugins.kernels.ops.grouped import (
    Form,
    GroupedWeight,
    dequantize,
    grouped_linear,
    grouped_linear_torch,
    join,
    pack,
    quantize,
)
from minisgl.plugins.quantization.grouped.layers import GroupedLayer

FORMS = [Form(8), Form(8, 16), Form(4), Form(4, mins=True)]


def random_weight(form: Form, outputs: int, columns: int, seed: int = 0) -> GroupedWeight:
    """Return a weight whose integers have all values."""
    generator = torch.Generator().manual_seed(seed)
    blocks = columns // 32
    integers = torch.randint(0, 256, (outputs, blocks, form.bits * 4), dtype=torch.uint8, generator=generator)
    integers[0] = 128  # the least value, with 8 bits
    scales = torch.randn(outputs, blocks, 32 // form.group, generator=generator) / 100
    mins = torch.randn(outputs, blocks, generator=generator) if form.mins else None
    return pack(form, outputs, columns, [(integers, scales, mins)])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product(form: Form, dtype: torch.dtype) -> None:
    """The C++ product equals the reference within the rounding of float32, and bit by bit for any rows and threads."""
    if not cpp.serves(torch.empty(1)):
        pytest.skip("compiler: C++ can't be compiled here")
    weight = random_weight(form, 200, 96)
    x = torch.randn(9, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[2] = 0
    x[3, :32] = -1.5
    bias = torch.randn(200).to(dtype)
    got, want = grouped_linear(x, weight, bias), grouped_linear_torch(x, weight, bias)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for rows in (1, 2, 3, 7):
                assert torch.equal(grouped_linear(x[:rows], weight, bias), got[:rows])
                assert torch.equal(grouped_linear(x[9 - rows :], weight, bias), got[9 - rows :])
    finally:
        torch.set_num_threads(threads)
    assert grouped_linear(x[:0], weight).shape == (0, 200)


@pytest.mark.parametrize("form", FORMS)
def test_reference(form: Form) -> None:
    """The reference is the product of the dequantised weight and the rounded x, and close to that of x itself."""
    weight = random_weight(form, 40, 64)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    numbers = dequantize(weight, torch.arange(40))
    largest = x.view(5, 2, 32).abs().amax(2, keepdim=True)
    rounded = ((x.view(5, 2, 32) * 127 / largest).round() * largest / 127).view(5, 64)
    got = grouped_linear_torch(x, weight)
    torch.testing.assert_close(got, rounded @ numbers.T, atol=1e-4, rtol=1e-4)
    assert (got - x @ numbers.T).norm() < 0.01 * got.norm()
    assert torch.equal(dequantize(weight, torch.tensor([39, 3])), numbers[[39, 3]])


@pytest.mark.parametrize(("bits", "error"), [(8, 0.01), (4, 0.12)])
def test_quantize(bits: int, error: float) -> None:
    """Quantised numbers are those of the package ``gguf``; zeros stay zeros."""
    gguf = pytest.importorskip("gguf")
    weight = torch.randn(33, 64, generator=torch.Generator().manual_seed(0))
    weight[5] = 0
    got = dequantize(quantize(weight, bits), torch.arange(33))
    kind = gguf.GGMLQuantizationType[{8: "Q8_0", 4: "Q4_0"}[bits]]
    want = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind))
    torch.testing.assert_close(got, want, atol=0, rtol=2e-3)  # the scales are rounded before or after they are used
    assert (got - weight).norm() < error * weight.norm()


def test_join() -> None:
    """Weights with whole panels and the same form become one."""
    whole, part = random_weight(Form(4), 32, 64), random_weight(Form(4), 20, 64, seed=1)
    (joined,) = join([whole, whole, part])
    numbers = [dequantize(weight, torch.arange(weight.outputs)) for weight in (whole, part)]
    assert torch.equal(dequantize(joined, torch.arange(84)), torch.cat([numbers[0], *numbers]))
    assert len(join([part, whole])) == len(join([whole, random_weight(Form(8), 32, 64)])) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_of_several_matrices(dtype: torch.dtype) -> None:
    """A layer of several matrices adds each bias before it rounds, as one call for all decoder layers does."""
    layer = GroupedLayer()
    layer.matrices = [random_weight(Form(8), 40, 64), random_weight(Form(4), 24, 64, seed=1)]
    generator = torch.Generator().manual_seed(2)
    x, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 64), (64,)))
    got = layer.multiply(x, bias)
    parts = zip(layer.matrices, bias.split([40, 24]), strict=True)
    assert torch.equal(got, torch.cat([grouped_linear(x, matrix, part) for matrix, part in parts], dim=1))
    assert torch.equal(layer.multiply(x), torch.cat([grouped_linear(x, matrix) for matrix in layer.matrices], dim=1))
