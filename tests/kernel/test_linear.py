"""The oneDNN product with packed weights on a CPU, compared with torch's, and which matrices are packed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minisgl.kernel import linear as kernel
from minisgl.kernel.linear import linear, pack


@pytest.mark.parametrize("rows", [1, 2, 7, 32, 300])
@pytest.mark.parametrize(("out", "inner"), [(512, 256), (96, 64), (33, 17), (1, 5)])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_product(rows: int, out: int, inner: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, w = torch.randn(rows, inner, generator=generator), torch.randn(out, inner, generator=generator)
    b = torch.randn(out, generator=generator) if bias else None
    packed = pack(w)
    assert packed is not None
    want = F.linear(x.double(), w.double(), None if b is None else b.double())
    torch.testing.assert_close(linear(x, w, b, packed).double(), want, atol=1e-4, rtol=1e-5)
    strided = torch.randn(rows, 2 * inner, generator=generator)[:, :inner]
    torch.testing.assert_close(linear(strided, w, b, packed), F.linear(strided, w, b), atol=1e-4, rtol=1e-5)


def test_matrices_that_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.zeros(64, 32)
    assert pack(w.to(torch.bfloat16)) is None
    assert pack(w[:0]) is None
    monkeypatch.setattr(kernel, "PACKED_BYTES", w.nbytes - 1)
    assert pack(w) is None


def test_packing_copies_the_weight() -> None:
    """Changing the weight after packing does not change the packed copy."""
    w = torch.eye(16)
    packed = pack(w)
    w.zero_()
    x = torch.randn(3, 16)
    torch.testing.assert_close(linear(x, w, None, packed), x)
