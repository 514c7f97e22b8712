"""Which FP8 products are computed before the first request, so that DeepGEMM compiles none later.

The product only looks like FlashInfer's: tests/gpu/test_warmup.py uses the real one.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.plugins.kernels.ops import fp8_compiler
from minisgl.plugins.kernels.ops.fp8 import E4M3, Fp8Weight, blocks
from minisgl.plugins.kernels.ops.fp8_compiler import Job, is_prepared, prepare, row_counts

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
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the GPU's functions do nothing; there are 8 cores, and free memory for three processes."""
    monkeypatch.setenv("TRTLLM_DG_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(fp8_compiler.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7 << 30, 80 << 30))
    for name in ("synchronize", "empty_cache", "set_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch, no_gpu: None) -> list[list[Job]]:
    """Return the jobs of each process that `prepare` starts; none is started."""
    started: list[list[Job]] = []

    @contextmanager
    def start(
        product: Product, jobs: Sequence[Job], device: torch.device, nice: int, errors: Any
    ) -> Iterator[SimpleNamespace]:
        started.append(list(jobs))
        yield SimpleNamespace(wait=lambda limit: 0)

    monkeypatch.setattr(fp8_compiler, "_started", start)
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
    assert is_prepared(product, [weight_of(256, 128)], 300)
    assert not is_prepared(product, [weight_of(256, 128)], 301)
    assert not is_prepared(product, [weight_of(512, 128)], 300)
    prepare(product, [weight_of(256, 128)], 300)
    assert workers == []
    assert product.calls == first * 2  # they are loaded from disk again


def test_without_weights_nothing_is_compiled(workers: list[list[Job]], tmp_path: Path) -> None:
    prepare(Product(tmp_path), [], 300)
    assert workers == []


def planted_product(x: Tensor, weight: Tensor, factors: Tensor | None, scales: Tensor) -> Tensor:
    """Stand for FlashInfer's product, which a process imports by name."""
    raise AssertionError("the jobs are only recorded")


class Worker:
    """A process that `compile_kernels` starts: its command, and another program that runs in place of it."""

    def __init__(self, program: str, monkeypatch: pytest.MonkeyPatch):
        self.commands: list[list[str]] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        popen = subprocess.Popen

        def start(command: list[str], **pipes: Any) -> subprocess.Popen[bytes]:
            self.commands.append(command)
            self.processes.append(popen([sys.executable, "-c", program], **pipes))
            return self.processes[-1]

        monkeypatch.setattr(fp8_compiler.subprocess, "Popen", start)


def test_a_process_computes_its_jobs(monkeypatch: pytest.MonkeyPatch, no_gpu: None) -> None:
    """The command line of a process, read by the process's own code."""
    computed: list[tuple[object, ...]] = []

    def multiply(product: object, weight: Fp8Weight, rows: int) -> None:
        assert weight.scale_inv.shape == tuple(map(blocks, weight.values.shape))
        computed.append((product, Job(*weight.values.shape, rows)))

    worker = Worker("", monkeypatch)
    monkeypatch.setattr(fp8_compiler, "_multiply", multiply)
    jobs = [Job(256, 128, 2), Job(128, 384, 64)]
    fp8_compiler.compile_kernels(planted_product, jobs, torch.device("cuda", 1))
    assert [each[1:7] for each in worker.commands] == [
        ["-m", "minisgl.plugins.kernels.ops.fp8_compiler", __name__, "planted_product", "1", "0"]
    ] * 2
    monkeypatch.setattr(torch, "device", lambda *name: CPU)
    ends: list[object] = []
    monkeypatch.setattr(fp8_compiler, "when_input_closes", ends.append)
    for command in worker.commands:
        fp8_compiler.main(command[3:])
    assert computed == [(planted_product, job) for job in jobs]
    assert len(ends) == len(jobs)


def test_a_failed_process_is_logged(
    monkeypatch: pytest.MonkeyPatch, no_gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    Worker("raise RuntimeError('nvcc is missing')", monkeypatch)
    fp8_compiler.compile_kernels(planted_product, [Job(256, 128, 2)], torch.device("cuda", 0))
    assert "ended with status 1: RuntimeError: nvcc is missing" in caplog.text


def test_no_process_outlives_the_limit(
    monkeypatch: pytest.MonkeyPatch, no_gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fp8_compiler, "LIMIT_SECONDS", 0)
    worker = Worker("import time; time.sleep(600)", monkeypatch)
    fp8_compiler.compile_kernels(planted_product, [Job(256, 128, 2)], torch.device("cuda", 0))
    assert "was killed after 0 s" in caplog.text
    assert all(process.returncode for process in worker.processes)


def test_processes_prepare_one_after_another(no_gpu: None, tmp_path: Path) -> None:
    """While one process holds the lock, another one cannot take it."""
    with fp8_compiler._one_at_a_time(), open(tmp_path / "minisgl.lock") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open(tmp_path / "minisgl.lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_stop_ends_all_processes(monkeypatch: pytest.MonkeyPatch, no_gpu: None, tmp_path: Path) -> None:
    """Also the compilers that a process has started: here one that would write a file."""
    mark = tmp_path / "pid"
    child = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    worker = Worker(
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}, {str(mark)!r}])", monkeypatch
    )
    stop = threading.Event()
    arguments = (planted_product, [Job(256, 128, 2)], torch.device("cuda", 0), 1, 0, stop)
    thread = threading.Thread(target=fp8_compiler.compile_kernels, args=arguments)
    thread.start()
    while not (mark.exists() and mark.read_text()):
        time.sleep(0.01)
    stop.set()
    thread.join()
    assert all(process.returncode for process in worker.processes)
    while _runs(int(mark.read_text())):
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    """Return whether a process exists and has not ended; init may not have reaped one that has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
