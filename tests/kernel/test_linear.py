"""The oneDNN product with packed weights on a CPU, compared with torch's, and which matrices are packed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from minisgl.kernel import linear as kernel
from minisgl.kernel.linear import linear, pack


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 32, 64, 65, 300])
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


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 64, 256, 300, 513])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_product(rows: int, bias: bool, dtype: torch.dtype) -> None:
    """The product in blocks has a row for each row of x, and equals the product of all rows at once."""
    generator = torch.Generator().manual_seed(rows)
    x, w = torch.randn(rows, 64, generator=generator).to(dtype), torch.randn(48, 64, generator=generator).to(dtype)
    b = torch.randn(48, generator=generator).to(dtype) if bias else None
    torch.testing.assert_close(linear(x, w, b), F.linear(x, w, b), atol=0.05, rtol=0.02)


GROWTH = """
import sys
from pathlib import Path

import torch

from minisgl.kernel.linear import linear, pack

torch.set_num_threads(1)


def private_mib():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024


w = torch.randn(768, 256, dtype=getattr(torch, sys.argv[1]))
x = torch.randn(2048, 256, dtype=w.dtype)
packed = pack(w)
with torch.inference_mode():
    linear(x, w, None, packed)
    before = private_mib()
    for rows in range(1, 600, 2):
        linear(x[:rows], w, None, packed)
print(private_mib() - before)
"""


@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="reads the process's memory from Linux's /proc"
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_with_many_numbers_of_rows(dtype: str) -> None:
    """300 different numbers of rows keep less than 40 MiB: oneDNN keeps memory for each number that it is given."""
    out = subprocess.run([sys.executable, "-c", GROWTH, dtype], capture_output=True, text=True, check=True).stdout
    assert float(out) < 40, f"{float(out):.0f} MiB"


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
