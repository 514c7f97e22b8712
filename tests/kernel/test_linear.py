"""The products on a CPU, compared with torch's: packed weights, with C++ and oneDNN, and weights in place with C++."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from minisgl.plugins.kernels.ops import huge_pages
from minisgl.plugins.kernels.ops import linear as kernel
from minisgl.plugins.kernels.ops.cpp import linear as cpp
from minisgl.plugins.kernels.ops.cpp import load
from minisgl.plugins.kernels.ops.linear import linear, pack


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 32, 64, 65, 300])
@pytest.mark.parametrize(("out", "inner"), [(512, 256), (208, 64), (33, 17), (1, 5)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("compiler", [False, True])
def test_packed_product(
    rows: int, out: int, inner: int, bias: bool, compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product with a packed weight equals the product in float64, with oneDNN and with C++."""
    if compiler:
        compiler_or_skip()
    else:
        monkeypatch.setattr(cpp, "compiled", lambda: None)
    generator = torch.Generator().manual_seed(rows)
    x, w = torch.randn(rows, inner, generator=generator), torch.randn(out, inner, generator=generator)
    b = torch.randn(out, generator=generator) if bias else None
    packed = pack(w)
    assert packed is not None
    assert packed.cpp == (compiler and out % cpp.MULTIPLE == 0)
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

from minisgl.plugins.kernels.ops.linear import linear, pack

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


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 13, 28, 29, 300])
@pytest.mark.parametrize(("out", "inner"), [(16, 16), (1024, 48), (208, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_product_in_cpp(
    rows: int, out: int, inner: int, dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both C++ kernels equal the product in float64, for strided rows too; a row does not depend on the other rows."""
    compiler_or_skip()
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 2 * inner, generator=generator).to(dtype)[:, :inner]
    w = torch.randn(out, inner, generator=generator).to(dtype)
    b = torch.randn(out, generator=generator).to(dtype) if bias else None
    assert cpp.serves(w)
    want = F.linear(x.double(), w.double(), None if b is None else b.double())
    eps = 1e-4 if dtype == torch.float32 else 2e-2
    for few_rows in (0, 1000):
        measured = replace(cpp.ROWS["avx"], in_place={dtype: few_rows})
        monkeypatch.setattr(cpp, "rows", lambda measured=measured: measured)
        got = cpp.linear(x, w, b)
        torch.testing.assert_close(got.double(), want, atol=eps, rtol=eps)
        assert torch.equal(got[:30], torch.cat([cpp.linear(x[i : i + 1], w, b) for i in range(min(rows, 30))]))
        transposed = x.t().contiguous().t()
        assert torch.equal(cpp.linear(transposed, w, b), got)


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_do_not_change_a_product(threads: int) -> None:
    """The C++ kernels compute the same bits with any number of threads."""
    compiler_or_skip()
    before = torch.get_num_threads()
    x, w = torch.randn(61, 256), torch.randn(784, 256)
    panels = cpp.pack(w)

    def products() -> list[torch.Tensor]:
        return [cpp.linear(x, w, None), cpp.linear(x[:5], w, None), cpp.packed_linear(x, panels, len(w), None)]

    torch.set_num_threads(1)
    try:
        want = products()
        torch.set_num_threads(threads)
        assert all(map(torch.equal, products(), want))
    finally:
        torch.set_num_threads(before)


def test_product_without_this_processors_instructions() -> None:
    """Compiled for any processor of this architecture, with smaller tiles, the kernels compute the same products."""
    compiler_or_skip()
    module = load("linear.cpp")
    generator = torch.Generator().manual_seed(0)
    w, b = torch.randn(80, 64, generator=generator), torch.randn(80, generator=generator)
    for dtype, eps in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        for rows, few_rows in ((3, 100), (1, 0), (20, 0)):
            x = torch.randn(rows, 64, generator=generator).to(dtype)
            out = torch.empty(rows, 80, dtype=dtype)
            module.linear(x, w.to(dtype), b.to(dtype), out, few_rows, 2)
            want = F.linear(x.double(), w.to(dtype).double(), b.to(dtype).double())
            torch.testing.assert_close(out.double(), want, atol=eps, rtol=eps)
    width = module.panel_outputs()
    panels, out = torch.empty(-(-80 // width), 64, width), torch.empty(7, 80)
    module.pack(w, panels)
    x = torch.randn(7, 64, generator=generator)
    module.packed_linear(x, panels, b, out, 1)
    torch.testing.assert_close(out, F.linear(x, w, b), atol=1e-4, rtol=1e-4)


def test_wrong_sizes_are_refused() -> None:
    """The compiled functions check sizes and dtypes."""
    compiler_or_skip()
    w = torch.zeros(32, 64)
    none, panels = w.view(-1)[:0], cpp.pack(w)
    module = cpp.compiled()
    with pytest.raises(ValueError, match="do not fit together"):
        module.linear(torch.zeros(2, 48), w, none, torch.zeros(2, 32), 8, 1)
    with pytest.raises(ValueError, match="another element type"):
        module.linear(torch.zeros(2, 64).bfloat16(), w, none, torch.zeros(2, 32), 8, 1)
    with pytest.raises(ValueError, match="multiples of 16"):
        module.linear(torch.zeros(2, 63), w[:, :63].contiguous(), none, torch.zeros(2, 32), 8, 1)
    with pytest.raises(ValueError, match="panels must be made by pack"):
        module.packed_linear(torch.zeros(2, 64), panels, none, torch.zeros(2, 320), 1)


def test_products_in_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ serves the numbers of rows in its table; torch serves more rows, odd sizes and other dtypes."""
    compiler_or_skip()
    calls = []

    def watch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        calls.append(len(x))
        return F.linear(x, weight, bias)

    monkeypatch.setattr(cpp, "linear", watch)
    monkeypatch.setattr(cpp, "rows", lambda: cpp.ROWS["avx512_bf16"])
    w = torch.randn(32, 64)
    for dtype, most in cpp.ROWS["avx512_bf16"].served.items():
        calls.clear()
        for rows in (0, 1, most, most + 1):
            linear(torch.randn(rows, 64).to(dtype), w.to(dtype))
        assert calls == [1, most]
    calls.clear()
    linear(torch.randn(1, 64).half(), w.half())
    linear(torch.randn(1, 63).bfloat16(), w.bfloat16()[:, :63].contiguous())
    linear(torch.randn(1, 64).bfloat16(), w.bfloat16()[:31])
    linear(torch.randn(2, 1, 64).bfloat16(), w.bfloat16())
    assert calls == []


def test_rows_of_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed copy serves 3 rows and more; 1 and 2 rows are computed with the weight in place."""
    compiler_or_skip()
    calls = []
    monkeypatch.setattr(cpp, "linear", lambda x, *_: calls.append(("in place", len(x))))
    monkeypatch.setattr(cpp, "packed_linear", lambda x, *_: calls.append(("packed", len(x))))
    w = torch.randn(32, 64)
    packed, most = pack(w), cpp.rows().served[torch.float32]
    for rows in (1, 2, 3, most, most + 1):
        linear(torch.randn(rows, 64), w, None, packed)
    assert calls == [("in place", 1), ("in place", 2), ("packed", 3), ("packed", most)]


CPU_TIMES = """
import json
import time

import torch
import torch.nn.functional as F

from minisgl.plugins.kernels.ops.cpp import linear, load

torch.set_num_threads(1)
module = load("linear.cpp", native=True, flags=["-mno-avx512f"])
table = linear.ROWS[module.target()]


def times(*functions):  # milliseconds of CPU time, the shortest of 15 runs that alternate
    best = [float("inf")] * len(functions)
    for _ in range(15):
        for i, function in enumerate(functions):
            started = time.thread_time()
            function()
            best[i] = min(best[i], time.thread_time() - started)
    return [1000 * seconds for seconds in best]


def near(got, x, weight):
    eps = 1e-3 if x.dtype == torch.float32 else 5e-2
    torch.testing.assert_close(got.double(), F.linear(x.double(), weight.double()), atol=eps, rtol=eps)


weight = torch.randn(1024, 1024) / 16
width = module.panel_outputs()
panels = torch.empty(1024 // width, 1024, width)
module.pack(weight, panels)
measured = {}
for rows in (1, 4, 12, 32, 64):
    x, none = torch.randn(rows, 1024), torch.empty(0)
    out = torch.empty(rows, 1024)
    half = [t.bfloat16() for t in (x, weight, none, out)]

    def product(x, weight, none, out):
        module.linear(x, weight, none, out, table.in_place[x.dtype], 1)

    products = {
        "float32": lambda: product(x, weight, none, out),
        "float32, packed": lambda: module.packed_linear(x, panels, none, out, 1),
        "bfloat16": lambda: product(*half),
    }
    for name, compute in products.items():
        out.zero_()
        compute()
        near(half[3], *half[:2]) if name == "bfloat16" else near(out, x, weight)
    sgemm, *ours = times(lambda: F.linear(x, weight), *products.values())
    measured |= {f"{rows} rows, {name}": (ms, sgemm) for name, ms in zip(products, ours)}
print(json.dumps(measured))
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="AVX-512 exists on x86-64 only")
def test_time_without_avx512() -> None:
    """Compiled without AVX-512, the products are right, and take at most twice the CPU time of torch's sgemm.

    With vectors of 512 bits, which GCC then keeps in memory, they took 2.5 to 7 times its time.
    """
    compiler_or_skip()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    command = [sys.executable, "-c", CPU_TIMES]
    for _ in range(3):  # other processes that use the caches and the memory may slow one of the two down
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        slow = {name: times for name, times in json.loads(done.stdout).items() if times[0] > 2 * times[1]}
        if not slow:
            break
    assert not slow, f"milliseconds, and those of sgemm: {slow}"


def test_targets() -> None:
    """The table has a row for each set of instructions that the library may be compiled for."""
    compiler_or_skip()
    assert cpp.rows() is cpp.ROWS[cpp.compiled().target()]
    assert load("linear.cpp").target() == "other"  # only instructions that all processors have
    for rows in cpp.ROWS.values():
        assert rows.in_place.keys() == rows.served.keys() == {torch.bfloat16, torch.float32}


def test_products_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a C++ compiler torch computes all products."""
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    cpp.compiled.cache_clear()
    try:
        x, w = torch.randn(2, 64).bfloat16(), torch.randn(32, 64).bfloat16()
        assert not cpp.serves(w)
        assert torch.equal(linear(x, w), F.linear(x, w))
    finally:
        cpp.compiled.cache_clear()


def test_huge_pages() -> None:
    """Tensors in huge pages have the shape and dtype that was asked for, and do not overlap."""
    cpu = torch.device("cpu")
    large = huge_pages.empty((1024, 1030), torch.bfloat16, cpu).zero_()
    assert large.shape == (1024, 1030) and large.dtype == torch.bfloat16 and not large.any()
    assert huge_pages.empty((0, 5), torch.float32, cpu).shape == (0, 5)
    arena = huge_pages.Arena(block_bytes=4096)
    parts = [arena.empty((size, 3), torch.float32).fill_(size) for size in (1, 100, 200, 50, 2000, 7)]
    for part in parts:
        assert (part == len(part)).all() and part.shape[1] == 3 and part.data_ptr() % 64 == 0


def compiler_or_skip() -> None:
    """Skip the test if there is no C++ compiler here."""
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed here")
    if shutil.which("c++") is None or shutil.which("ninja") is None:
        pytest.skip("no C++ compiler, or no ninja")
