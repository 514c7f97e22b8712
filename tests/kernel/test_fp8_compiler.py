"""Which FP8 products are computed before the first request, so that DeepGEMM compiles none later.

The product only looks like FlashInfer's: tests/gpu/test_warmup.py uses the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from minisgl.kernel import fp8_compiler
from minisgl.kernel.fp8 import E4M3, Fp8Weight, blocks
from minisgl.kernel.fp8_compiler import Job, prepare, row_counts

CPU = torch.device("cpu")


def kernel(rows: int) -> tuple[int, int, bool]:
    """Return what DeepGEMM's choice of a kernel depends on, besides the weight."""
    if rows < 32:
        return (0, rows, False)
    tile = 64 if rows <= 64 else 128
    return (tile, -(-rows // tile), rows >= 1024)


def weight_of(out: int, inner: int) -> Fp8Weight:
    """Return a weight of zeros."""
    return Fp8Weight(torch.zeros(out, inner).to(E4M3), torch.ones(blocks(out), blocks(inner)))


@pytest.mark.parametrize("most", [1, 2, 20, 40, 64, 65, 200, 1000, 1023, 1024, 1100, 8192])
def test_row_counts_need_all_kernels(most: int) -> None:
    counts = row_counts(most)
    assert {kernel(rows) for rows in counts} == {kernel(rows) for rows in range(2, most + 1)}
    assert all(1 < rows <= most for rows in counts)


class Product:
    """Writes the file of a kernel when it first multiplies with a weight and a number of rows."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.calls: list[Job] = []

    def __call__(self, x: Tensor, weight: Tensor, factors: Tensor | None, scales: Tensor) -> Tensor:
        assert factors is None
        job = Job(*weight.shape, len(x))
        assert scales.shape == (blocks(job.out), blocks(job.inner))
        self.calls.append(job)
        path = self.folder / "cache" / "_".join(map(str, (job.out, job.inner, *kernel(job.rows)))) / "kernel.cubin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return x


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[Job]]:
    """Return the jobs of each process that `prepare` starts; none is started. The GPU's functions do nothing."""
    started: list[list[Job]] = []

    def start(product: Product, jobs: Sequence[Job], device: torch.device) -> SimpleNamespace:
        started.append(list(jobs))
        return SimpleNamespace(wait=lambda: 0, returncode=0, kill=lambda: None)

    monkeypatch.setenv("TRTLLM_DG_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(fp8_compiler, "_start", start)
    monkeypatch.setattr(fp8_compiler.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7 << 30, 80 << 30))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    return started


def test_each_shape_is_multiplied_with_each_row_count(workers: list[list[Job]], tmp_path: Path) -> None:
    """Layers of the same shape share their kernels. Free memory is enough for three processes."""
    product = Product(tmp_path)
    prepare(product, [weight_of(256, 128), weight_of(128, 384), weight_of(256, 128)], 300)
    wanted = [Job(*shape, rows) for shape in ((256, 128), (128, 384)) for rows in row_counts(300)]
    assert product.calls == wanted
    assert len(workers) == 3
    assert [job for part in workers for job in part] == wanted[1:]


def test_no_process_is_started_if_kernels_are_on_disk(workers: list[list[Job]], tmp_path: Path) -> None:
    product = Product(tmp_path)
    prepare(product, [weight_of(256, 128)], 300)
    first = product.calls.copy()
    workers.clear()
    prepare(product, [weight_of(256, 128)], 300)
    assert workers == []
    assert product.calls == first * 2  # they are loaded from disk again


def test_without_weights_nothing_is_compiled(workers: list[list[Job]], tmp_path: Path) -> None:
    prepare(Product(tmp_path), [], 300)
    assert workers == []


def planted_product(x: Tensor, weight: Tensor, factors: Tensor | None, scales: Tensor) -> Tensor:
    """Stand for FlashInfer's product, which a process imports by name."""
    raise AssertionError("the jobs are only recorded")


def test_a_process_computes_its_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line of a process, read by the process's own code."""
    commands: list[list[str]] = []
    computed: list[tuple[object, ...]] = []

    def multiply(product: object, weight: Fp8Weight, rows: int) -> None:
        assert weight.scale_inv.shape == tuple(map(blocks, weight.values.shape))
        computed.append((product, Job(*weight.values.shape, rows)))

    monkeypatch.setattr(fp8_compiler.subprocess, "Popen", lambda command, **pipes: commands.append(command))
    monkeypatch.setattr(fp8_compiler, "_multiply", multiply)
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    jobs = [Job(256, 128, 2), Job(128, 384, 64)]
    fp8_compiler._start(planted_product, jobs, torch.device("cuda", 1))
    assert commands[0][1:6] == ["-m", "minisgl.kernel.fp8_compiler", __name__, "planted_product", "1"]
    monkeypatch.setattr(torch, "device", lambda *name: CPU)
    fp8_compiler.main(commands[0][3:])
    assert computed == [(planted_product, job) for job in jobs]
