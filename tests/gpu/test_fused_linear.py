"""The products that are fused with norm, addition and activation, compared with their torch references in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from torch import Tensor

from minisgl.plugins.kernels.ops import fused_linear as reference
from minisgl.plugins.kernels.ops.activation import Act
from minisgl.plugins.kernels.ops.triton import fused_linear as kernels

Random = Callable[..., Tensor]


@pytest.fixture
def random(device: torch.device, generator: torch.Generator) -> Random:
    """Return a function that returns new random tensors: in bfloat16, under the interpreter in float16."""
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    return lambda *shape: torch.randn(shape, generator=generator, device=device).to(dtype)


def assert_close(out: Tensor, expected: Tensor) -> None:
    """Check each element's error relative to its magnitude, or to 1 if its magnitude is smaller. NaN fails."""
    assert out.shape == expected.shape
    error = (out.cpu().double() - expected).abs() / expected.abs().clamp(min=1.0)
    assert error.max().item() < (3e-3 if out.dtype == torch.float16 else 2e-2)


def wide(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return copies in float64 on the CPU."""
    return [None if t is None else t.cpu().double() for t in tensors]


ROWS = [1, 5, 64, 65, 130, 256]
"""Rows of one tile and of several, of whole tiles and of others, for each tile of `kernels.NORMED` and the others."""
FEW = [1, 65]
"""The rows of `ROWS` that the interpreter computes."""


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("out", "inner"), [(128, 256), (384, 768), (4096, 1024)])
def test_add_linear(
    out: int, inner: int, biased: bool, normed: bool, rows: int, random: Random, compiled: bool
) -> None:
    if not compiled and (out > 128 or rows not in FEW or biased != normed):
        pytest.skip("too slow for the interpreter")
    x, weight, residual = random(rows, inner), random(out, inner) / inner**0.5, random(rows, out)
    bias, norm = random(out) if biased else None, random(out) if normed else None
    assert kernels.serves(torch.bfloat16, weight.bfloat16())
    got = kernels.add_linear(x, weight, bias, residual, norm)
    want = reference.add_linear_torch(*wide(x, weight, bias, residual, norm))  # type: ignore[arg-type]
    assert_close(got.x, want.x)
    assert_close(got.scaled, want.scaled)
    if not normed:
        assert got.squares is None
        return
    assert got.squares is not None
    squares = got.x.cpu().double().square().sum(1)  # of the rounded sum
    torch.testing.assert_close(got.squares.cpu().double().sum(0), squares, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("act", [None, "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("out", "inner", "parts", "biased"),
    [(128, 256, 0, False), (128, 256, 3, True), (384, 768, 64, False), (3072, 1024, 24, True)],
)
def test_normed_linear(
    out: int, inner: int, parts: int, biased: bool, act: Act | None, rows: int, random: Random, compiled: bool
) -> None:
    """Also numbers of parts that are no powers of two, and none."""
    if not compiled and (out > 128 or rows not in FEW or act not in (None, "silu")):
        pytest.skip("too slow for the interpreter")
    x, weight = random(rows, inner), random(out if act is None else 2 * out, inner) / inner**0.5
    bias = random(len(weight)) if biased else None
    squares = random(parts, rows).float().square() * (inner / parts) if parts else None
    assert kernels.serves(torch.bfloat16, weight.bfloat16())
    got = kernels.normed_linear(x, squares, 0.01, weight, bias, act)
    wide_x, wide_squares, wide_weight, wide_bias = wide(x, squares, weight, bias)
    assert wide_x is not None
    assert wide_weight is not None
    assert_close(got, reference.normed_linear_torch(wide_x, wide_squares, 0.01, wide_weight, wide_bias, act))


def test_two_products_are_a_norm(random: Random) -> None:
    """What the product before a norm leaves to the one after it gives RMSNorm of the sum."""
    x, weight, residual, norm = random(3, 256), random(128, 256) / 16, random(3, 128), random(128)
    after = random(256, 128) / 11
    stream = kernels.add_linear(x, weight, None, residual, norm)
    normed = torch.nn.functional.rms_norm(stream.x.cpu().double(), [128], norm.cpu().double(), 1e-6)
    got = reference.normed_linear_torch(stream.scaled, stream.squares, 1e-6, after)
    assert_close(got, normed @ after.cpu().double().t())


def test_served_weights(device: torch.device) -> None:
    """Whole tiles in bfloat16, not too large. In float16 the scaled residual stream could overflow."""

    def weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    bf16, half, single = torch.bfloat16, torch.float16, torch.float32
    assert kernels.serves(bf16, weight(256, 512))
    assert not kernels.serves(half, weight(256, 512, dtype=half))
    assert not kernels.serves(single, weight(256, 512, dtype=single))
    assert not kernels.serves(single, weight(256, 512))
    assert not kernels.serves(bf16, weight(192, 512))
    assert not kernels.serves(bf16, weight(256, 384))
    assert not kernels.serves(bf16, weight(512, 512)[:, :256])
    assert not kernels.serves(bf16, weight(kernels.MAX_BYTES // 512 + 128, 256))
