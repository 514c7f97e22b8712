"""Compilation of the kernels of FlashInfer's FP8 product, for all numbers of rows, before the first request.

The product contains DeepGEMM. For each shape of a weight, DeepGEMM divides the result into tiles whose size depends on
the number of rows, and compiles a kernel for each size when it is first needed, with nvcc. It keeps the kernels in a
folder on disk (`minisgl.plugins.kernels.ops.compilations.deep_gemm_kernels`). `prepare` multiplies once with each
number of rows that may need another kernel. On a machine without these kernels, several processes do so at the same
time: ``python -m minisgl.plugins.kernels.ops.fp8_compiler MODULE FUNCTION DEVICE NICE OUT,IN,ROWS …``.
`minisgl.plugins.kernels.ops.fp8_behind` does it while another product serves requests.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch import Tensor

from minisgl.cluster.process import when_input_closes
from minisgl.plugins.kernels.ops.compilations import deep_gemm_folder, deep_gemm_kernels
from minisgl.plugins.kernels.ops.fp8 import E4M3, Fp8Weight, blocks

__all__ = ["Job", "compile_kernels", "is_prepared", "jobs_of", "main", "prepare", "row_counts"]

log = logging.getLogger(__name__)

Product = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
"""FlashInfer's ``fp8_blockscale_gemm_sm90``: (x, weight, factors of x, scales of the weight) → x·weightᵀ.

It is a function of a module, so that another process can import it.
"""

MAX_WORKERS = 8
"""The largest number of processes that compile. Each needs about 1 GiB of memory on the GPU, and 3 GiB on the host."""
WORKER_BYTES = 2 << 30
"""Free memory on the GPU for each process."""
LIMIT_SECONDS = 600
"""Processes that still run after this time are killed. What they did not compile is then compiled in this process."""

POLL_SECONDS = 0.5
"""Time between two looks at an event that ends the compilation."""


class Job(NamedTuple):
    """A product of ``rows`` rows with a weight [out, inner]."""

    out: int
    inner: int
    rows: int


def row_counts(most: int) -> list[int]:
    """Return numbers of rows, at most ``most``, with which all kernels for 2 to ``most`` rows are needed.

    The kernel of DeepGEMM depends on the exact number up to 31 rows, then on the number of tiles of 64 rows (up to 64)
    or 128 rows (above), and on whether there are 1,024 rows.
    """
    counts = {*range(2, 32), 64, 1023, *range(128, most + 128, 128)}
    return sorted({min(count, most) for count in counts} - {1})


def jobs_of(weights: Iterable[Fp8Weight], most: int) -> list[Job]:
    """Return the products of ``weights`` with up to ``most`` rows that may need different kernels."""
    shapes = {tuple(weight.values.shape): None for weight in weights}
    return [Job(out, inner, rows) for out, inner in shapes for rows in row_counts(most)]


def is_prepared(product: Product, weights: Iterable[Fp8Weight], most: int) -> bool:
    """Return whether `prepare` ended with these arguments before, on this machine, with the same libraries."""
    return deep_gemm_kernels() > 0 and _marker(product, jobs_of(weights, most)).exists()


def _marker(product: Product, jobs: Sequence[Job]) -> Path:
    """Return the file that shows that the kernels of ``jobs`` are on disk."""
    library = importlib.import_module(product.__module__.partition(".")[0])
    gpu = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    known = (getattr(library, "__version__", ""), torch.version.cuda, gpu, sorted(jobs))
    return deep_gemm_folder() / "minisgl" / hashlib.sha256(repr(known).encode()).hexdigest()[:24]


def prepare(product: Product, weights: Sequence[Fp8Weight], most: int) -> None:
    """Compile and load all kernels that products of ``weights`` with up to ``most`` rows need.

    If the kernel of the first product is on disk, those of the others are taken to be there too, and no process is
    started. A kernel that is missing after all is compiled in this process.
    """
    shapes, jobs = {tuple(weight.values.shape): weight for weight in weights}, jobs_of(weights, most)
    if not jobs:
        return
    started, device = time.monotonic(), weights[0].values.device

    def multiply(job: Job) -> None:
        _multiply(product, shapes[job.out, job.inner], job.rows)

    with _one_at_a_time():
        before = deep_gemm_kernels()
        multiply(jobs[0])
        if deep_gemm_kernels() > before:
            compile_kernels(product, jobs[1:], device)
        for job in jobs[1:]:
            multiply(job)
        compiled = deep_gemm_kernels() - before
        marker = _marker(product, jobs)
        marker.parent.mkdir(exist_ok=True)
        marker.touch()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    log.info("prepared FP8 products in %.1f s (%d kernels compiled)", time.monotonic() - started, compiled)


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Wait until no other process of this machine is in this context: the ranks of a server need the same kernels."""
    folder = deep_gemm_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "minisgl.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _multiply(product: Product, weight: Fp8Weight, rows: int) -> None:
    """Multiply ``rows`` rows that are not initialised, and drop the result."""
    values, scale_inv = weight
    product(torch.empty((rows, values.shape[1]), dtype=torch.bfloat16, device=values.device), values, None, scale_inv)


def compile_kernels(
    product: Product,
    jobs: Sequence[Job],
    device: torch.device,
    workers: int = MAX_WORKERS,
    nice: int = 0,
    stop: threading.Event | None = None,
) -> None:
    """Divide the jobs among up to ``workers`` processes, and wait until they have compiled the kernels.

    ``stop`` ends them earlier. ``nice`` is added to the niceness of the processes.
    """
    free, _ = torch.cuda.mem_get_info(device)
    count = max(1, min(workers, (os.cpu_count() or 1) // 2, free // WORKER_BYTES))
    log.info("compiling kernels of FP8 products in %d processes", count)
    size, deadline = -(-len(jobs) // count), time.monotonic() + LIMIT_SECONDS
    with ExitStack() as stack:
        started = []
        for i in range(0, len(jobs), size):
            errors = stack.enter_context(tempfile.TemporaryFile())
            context = _started(product, jobs[i : i + size], device, nice, errors)
            started.append((stack.enter_context(context), errors))
        for worker, errors in started:
            try:
                status = _wait(worker, deadline, stop)
            except subprocess.TimeoutExpired:
                log.warning("a process that compiles FP8 products was killed after %d s", LIMIT_SECONDS)
                continue
            if status is None:
                return
            if status:
                errors.seek(0)
                last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
                log.warning("a process that compiles FP8 products ended with status %d: %s", status, last)


def _wait(worker: subprocess.Popen[bytes], deadline: float, stop: threading.Event | None) -> int | None:
    """Return the exit status of a process, or None if ``stop`` is set before. Raise TimeoutExpired at the deadline."""
    while stop is not None and time.monotonic() < deadline - POLL_SECONDS:
        if stop.is_set():
            return None
        with suppress(subprocess.TimeoutExpired):
            return worker.wait(POLL_SECONDS)
    return worker.wait(max(0.0, deadline - time.monotonic()))


@contextmanager
def _started(
    product: Product, jobs: Sequence[Job], device: torch.device, nice: int, errors: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that computes the jobs; kill it and its compilers at the end of the context, if they still run.

    Its standard input is a pipe, which is closed when this process ends in any way: then the process ends, too.
    """
    words = [product.__module__, product.__name__, *map(str, (device.index or 0, nice))]
    words += [",".join(map(str, job)) for job in jobs]
    command = [sys.executable, "-m", "minisgl.plugins.kernels.ops.fp8_compiler", *words]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, process_group=0)
    try:
        yield worker
    finally:
        with suppress(ProcessLookupError):  # they have ended
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
        assert worker.stdin is not None
        worker.stdin.close()


def main(argv: Sequence[str]) -> None:
    """Compute products with a function of a module on a GPU.

    ``argv`` has module, function, number of the GPU, niceness, and the jobs.
    """
    when_input_closes(lambda: os.killpg(0, signal.SIGKILL))
    module, function, index, nice, *words = argv
    os.nice(int(nice))
    product = getattr(importlib.import_module(module), function)
    device = torch.device("cuda", int(index))
    torch.cuda.set_device(device)
    for job in (Job(*map(int, word.split(","))) for word in words):
        values = torch.empty((job.out, job.inner), dtype=E4M3, device=device)
        scale_inv = torch.empty((blocks(job.out), blocks(job.inner)), device=device)
        _multiply(product, Fp8Weight(values, scale_inv), job.rows)
    torch.cuda.synchronize(device)


if __name__ == "__main__":
    main(sys.argv[1:])
