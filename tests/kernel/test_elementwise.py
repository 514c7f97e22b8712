"""RMSNorm and the gated SiLU on a CPU: the C++ kernels against torch."""

from __future__ import annotations

import shutil
import sys

import pytest
import torch
import torch.nn.functional as F

from minisgl.plugins.kernels.ops import activation, norm
from minisgl.plugins.kernels.ops.cpp import elementwise as cpp
from minisgl.plugins.kernels.ops.cpp import load


@pytest.fixture
def compiler() -> None:
    """Skip the test if there is no compiler here."""
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed here")
    if shutil.which("c++") is None or shutil.which("ninja") is None:
        pytest.skip("no C++ compiler, or no ninja")


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Compare with the tolerance of one rounding to the dtype of ``got``."""
    eps = 1e-5 if got.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got.double(), want.double(), atol=eps, rtol=eps)


@pytest.mark.parametrize("rows", [0, 1, 7, 33, 700])
@pytest.mark.parametrize("size", [16, 48, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("compiler")
def test_norms(rows: int, size: int, dtype: torch.dtype) -> None:
    """The norm equals torch's; the sum with the residual has the same bits, and is written over x."""
    torch.manual_seed(rows)
    x, residual = torch.randn(rows, size).to(dtype) * 3, torch.randn(rows, size).to(dtype)
    weight, total = torch.rand(size).to(dtype), x + residual
    assert cpp.serves(x, size)
    near(norm.rms_norm(x, weight, 1e-5), F.rms_norm(x.double(), (size,), weight.double(), 1e-5))
    normed, added = norm.add_rms_norm(x, residual, weight, 1e-5)
    assert added is x and torch.equal(added, total)
    near(normed, F.rms_norm(total.double(), (size,), weight.double(), 1e-5))


@pytest.mark.parametrize("rows", [0, 1, 33, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("compiler")
def test_silu_and_mul(rows: int, dtype: torch.dtype) -> None:
    """The gated SiLU equals torch's, for large gates of both signs too."""
    torch.manual_seed(rows)
    x = torch.randn(rows, 96).to(dtype)
    x[:, :48] *= torch.logspace(-2, 3, 48).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    near(activation.silu_and_mul(x), F.silu(gate) * up)


@pytest.mark.usefixtures("compiler")
def test_special_values() -> None:
    """Infinite and NaN gates, and a row of zeros, give what torch gives."""
    gate = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0] * 4)
    got = activation.silu_and_mul(torch.cat((gate, torch.ones(16)))[None])[0]
    want = torch.tensor([float("inf"), float("nan"), float("nan"), 0.0] * 4)
    torch.testing.assert_close(got, F.silu(gate), equal_nan=True)
    torch.testing.assert_close(got, want, equal_nan=True)
    assert not norm.rms_norm(torch.zeros(1, 16), torch.ones(16), 1e-6).any()


@pytest.mark.usefixtures("compiler")
def test_threads_do_not_change_a_row() -> None:
    """The result has the same bits with any number of threads, and a row's does not depend on the other rows."""
    x, weight = torch.randn(1000, 96), torch.randn(96)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append((norm.rms_norm(x, weight, 1e-6), activation.silu_and_mul(x)))
    finally:
        torch.set_num_threads(before)
    for normed, gated in results:
        assert torch.equal(normed, results[0][0]) and torch.equal(gated, results[0][1])
    assert torch.equal(norm.rms_norm(x[7:8], weight, 1e-6), results[0][0][7:8])


@pytest.mark.usefixtures("compiler")
def test_what_torch_computes() -> None:
    """Odd sizes, other dtypes, more dimensions and strided rows are computed by torch, with the right result."""
    for x in (
        torch.randn(3, 17),
        torch.randn(3, 32).half(),
        torch.randn(2, 3, 32),
        torch.randn(3, 64)[:, :32],
    ):
        weight = torch.rand(x.shape[-1]).to(x.dtype)
        assert not cpp.serves(x, x.shape[-1])
        near(norm.rms_norm(x, weight, 1e-6), F.rms_norm(x.double(), weight.shape, weight.double(), 1e-6))


@pytest.mark.usefixtures("compiler")
def test_without_this_processors_instructions() -> None:
    """Compiled for any processor of this architecture, the kernels give the same results."""
    module = load("elementwise.cpp")
    x, weight = torch.randn(5, 64), torch.rand(64)
    out, gated = torch.empty(5, 64), torch.empty(5, 32)
    module.add_rms_norm(x, x[:0], weight, out, 1e-6, 1)
    module.silu_and_mul(x, gated, 1)
    near(out, F.rms_norm(x, (64,), weight, 1e-6))
    near(gated, F.silu(x[:, :32]) * x[:, 32:])


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a C++ compiler torch computes the same functions."""
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    cpp.compiled.cache_clear()
    try:
        x, weight = torch.randn(3, 32), torch.rand(32)
        assert not cpp.serves(x, 32)
        assert torch.equal(norm.rms_norm(x, weight, 1e-6), F.rms_norm(x, (32,), weight, 1e-6))
        near(activation.silu_and_mul(x), F.silu(x[:, :16]) * x[:, 16:])
    finally:
        cpp.compiled.cache_clear()
