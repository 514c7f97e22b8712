"""Compilation of the kernels of FlashInfer's FP8 product, for all numbers of rows, before the first request.

The product contains DeepGEMM. For each shape of a weight, DeepGEMM divides the result into tiles whose size depends on
the number of rows, and compiles a kernel for each size when it is first needed, with nvcc. It keeps the kernels in a
folder on disk (`minisgl.kernel.compilations.deep_gemm_kernels`). `prepare` multiplies once with each number of rows
that may need another kernel. On a machine without these kernels, several processes do so at the same time:
``python -m minisgl.kernel.fp8_compiler MODULE FUNCTION DEVICE OUT,IN,ROWS …``.
"""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.kernel.compilations import deep_gemm_kernels
from minisgl.kernel.fp8 import E4M3, Fp8Weight, blocks

__all__ = ["Job", "main", "prepare", "row_counts"]

log = logging.getLogger(__name__)

Product = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
"""FlashInfer's ``fp8_blockscale_gemm_sm90``: (x, weight, factors of x, scales of the weight) → x·weightᵀ.

It is a function of a module, so that another process can import it.
"""

MAX_WORKERS = 8
"""The largest number of processes that compile. Each needs about 1 GiB of memory on the GPU, and 3 GiB on the host."""
WORKER_BYTES = 2 << 30
"""Free memory on the GPU for each process."""


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


def prepare(product: Product, weights: Iterable[Fp8Weight], most: int) -> None:
    """Compile and load all kernels that products of ``weights`` with up to ``most`` rows need.

    If the kernel of the first product is on disk, those of the others are taken to be there too, and no process is
    started. A kernel that is missing after all is compiled in this process.
    """
    shapes = {tuple(weight.values.shape): weight for weight in weights}
    jobs = [(weight, rows) for weight in shapes.values() for rows in row_counts(most)]
    if not jobs:
        return
    started, before = time.monotonic(), deep_gemm_kernels()
    device = jobs[0][0].values.device
    _multiply(product, *jobs[0])
    if deep_gemm_kernels() > before:
        others = [Job(weight.values.shape[0], weight.values.shape[1], rows) for weight, rows in jobs[1:]]
        _compile(product, others, device)
    for weight, rows in jobs[1:]:
        _multiply(product, weight, rows)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    compiled = deep_gemm_kernels() - before
    log.info("prepared FP8 products in %.1f s (%d kernels compiled)", time.monotonic() - started, compiled)


def _multiply(product: Product, weight: Fp8Weight, rows: int) -> None:
    """Multiply ``rows`` rows that are not initialised, and drop the result."""
    values, scale_inv = weight
    product(torch.empty((rows, values.shape[1]), dtype=torch.bfloat16, device=values.device), values, None, scale_inv)


def _compile(product: Product, jobs: Sequence[Job], device: torch.device) -> None:
    """Let several processes compute the products, each a part of the row counts of one shape."""
    free, _ = torch.cuda.mem_get_info(device)
    count = max(1, min(MAX_WORKERS, (os.cpu_count() or 1) // 2, free // WORKER_BYTES))
    log.info("compiling kernels of FP8 products in %d processes", count)
    size = -(-len(jobs) // count)
    workers = [_start(product, jobs[i : i + size], device) for i in range(0, len(jobs), size)]
    try:
        for worker in workers:
            if worker.wait():
                log.warning("a process that compiles FP8 products ended with status %d", worker.returncode)
    finally:
        for worker in workers:
            worker.kill()  # does nothing if the process has ended


def _start(product: Product, jobs: Sequence[Job], device: torch.device) -> subprocess.Popen[bytes]:
    words = [product.__module__, product.__name__, str(device.index or 0), *(",".join(map(str, job)) for job in jobs)]
    command = [sys.executable, "-m", "minisgl.kernel.fp8_compiler", *words]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main(argv: Sequence[str]) -> None:
    """Compute products with a function of a module on a GPU: ``argv`` has module, function, GPU, and the jobs."""
    module, function, index, *words = argv
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
