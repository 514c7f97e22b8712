"""Compilation of an engine's Triton kernels, on all cores, before the buckets are recorded.

Triton compiles a kernel when it is first launched, one after another: on a machine without compiled kernels on disk,
the start of an engine waits for some sixty kernels. So `compile_ahead` records the forward passes of all buckets and of
a few steps that no bucket holds before, in CUDA graphs that are thrown away, so that no recorded operation is executed.
It notes the kernels that Triton would compile. Other processes compile them (`CompileWorkers`), because a compilation
in Triton holds Python's global lock for most of its time. Triton's cache on disk passes the results on.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from minisgl.plugins.graph.replaying.compile_workers import CompileWorkers, take_early
from minisgl.plugins.graph.replaying.record import Recorder
from minisgl.plugins.kernels.ops.compile_worker import Request

__all__ = ["Case", "compile_ahead"]

log = logging.getLogger(__name__)


class Case(NamedTuple):
    """A forward pass ``forward(build())``. It can be recorded (`Recorder.record`), with ``piecewise`` in pieces.

    ``build`` is called before the recording begins.
    """

    build: Callable[[], Any]
    forward: Callable[[Any], torch.Tensor]
    piecewise: bool = False


def compile_ahead(device: torch.device, cases: Sequence[Case]) -> int:
    """Compile the Triton kernels that the forward passes launch. Return how many were compiled.

    If the kernels of the first case are on disk, the others are taken to be there too, and nothing is compiled. Without
    a GPU or without Triton it returns 0. A forward pass for which the device has too little memory is left out. Another
    error is logged and ends it. Kernels that are left are compiled when they are launched.
    """
    if device.type != "cuda" or not cases or "triton" not in sys.modules:
        return 0
    from triton.runtime import driver

    started, recorder, noted = time.monotonic(), Recorder(device), _Noted()

    def note(case: Case) -> list[_Kernel]:
        inputs = case.build()
        with noted.instead_of_compiling():
            recorder.rehearse(case.forward, inputs, piecewise=case.piecewise)
        return noted.take()

    try:
        kernels = note(cases[0])
        if all(_on_disk(kernel) for kernel in kernels):
            return 0
        gpu = driver.active.get_current_target()
        target = (gpu.backend, gpu.arch, gpu.warp_size)
        with take_early() or CompileWorkers() as workers:
            workers.compile([kernel.request(target) for kernel in kernels])
            for kernels in _kernels_of(cases[:0:-1], note):  # prompts and large buckets first: they compile longest
                workers.compile([kernel.request(target) for kernel in kernels])
    except Exception as error:
        log.warning("kernels are compiled one after another, because of %s: %s", type(error).__name__, error)
        return 0
    torch.cuda.empty_cache()  # the memory of the last graph that was thrown away
    log.info("compiled %d kernels in %.1f s", workers.compiled, time.monotonic() - started)
    return workers.compiled


class _Kernel(NamedTuple):
    """A kernel that Triton would compile: see `Request`."""

    function: Any
    module: str
    name: str
    data: str

    def request(self, target: tuple[str, int, int]) -> Request:
        """Return the request to compile it for ``target``."""
        return Request(self.module, self.name, self.data, target)


def _kernels_of(cases: Iterable[Case], note: Callable[[Case], list[_Kernel]]) -> Iterator[list[_Kernel]]:
    """Yield the result of ``note`` for each case, but leave out a case that does not fit in the free memory.

    Triton raises another error than torch: it loads a kernel that is on disk, and the GPU has no memory for the code.
    Before each case, the GPU gets the memory of the earlier graphs back. Otherwise torch keeps it, although no graph
    uses it, until the GPU has no memory left and other libraries cannot load their kernels.
    """
    for case in cases:
        torch.cuda.empty_cache()
        try:
            kernels = note(case)
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error):
                raise
            log.info("a step was too large to find its kernels ahead: %s", str(error).partition("\n")[0])
        else:
            yield kernels


class _Noted:
    """The kernels that Triton was about to compile, each once."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str, str]] = set()
        self._new: list[_Kernel] = []

    def take(self) -> list[_Kernel]:
        """Return the kernels noted since the last call."""
        new, self._new = self._new, []
        return new

    @contextmanager
    def instead_of_compiling(self) -> Iterator[None]:
        """Note each kernel that is not compiled yet, and neither compile nor launch it."""
        from triton import knobs

        before = knobs.runtime.jit_cache_hook
        knobs.runtime.jit_cache_hook = self._note
        try:
            yield
        finally:
            knobs.runtime.jit_cache_hook = before

    def _note(self, *, key: str, fn: Any, **compilation: Any) -> bool:
        """Triton's hook before a compilation. True: do not compile."""
        if (same := (fn.module, fn.name, str(key))) not in self._seen:
            self._seen.add(same)
            data = compilation["compile"]["specialization_data"]
            self._new.append(_Kernel(fn.jit_function, fn.module, fn.name.rpartition(".")[2], data))
        return True


def _on_disk(kernel: _Kernel) -> bool:
    """Compile the kernel or load it from disk; return whether it was on disk."""
    from triton import knobs

    hits, before = [], knobs.compilation.listener

    def listen(*, cache_hit: bool, **compilation: Any) -> None:
        hits.append(cache_hit)
        if before is not None:
            before(cache_hit=cache_hit, **compilation)

    knobs.compilation.listener = listen
    try:
        kernel.function.preload(kernel.data)
    finally:
        knobs.compilation.listener = before
    return all(hits)
