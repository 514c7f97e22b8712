"""Compilation of the Triton kernels of all buckets at once, on all cores, before the buckets are recorded.

Triton compiles a kernel when it is first launched, one after another: on a machine without compiled kernels on disk,
the recording of the buckets waits for some sixty kernels. So `compile_ahead` records each bucket's forward pass before,
in a CUDA graph that is thrown away, so that no operation is executed, and notes the kernels that Triton would compile.
Other processes compile them, because a compilation in Triton holds Python's global lock for most of its time. Triton's
cache on disk passes the results on.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from minisgl.engine.record import Recorder
from minisgl.kernel.compile_worker import Request

__all__ = ["compile_ahead"]

log = logging.getLogger(__name__)

MAX_WORKERS = 16
"""The largest number of processes that compile. Each needs one core, and 0.7 GB of memory, most of it for torch."""


def compile_ahead(
    device: torch.device, keys: Sequence[Any], build: Callable[[Any], Any], forward: Callable[[Any], torch.Tensor]
) -> int:
    """Compile the Triton kernels that ``forward(build(key))`` launches, for all keys. Return how many were compiled.

    ``forward`` must be a forward pass that can be recorded (`minisgl.engine.record`). If the kernels of the smallest
    bucket are on disk, the others are taken to be there too, and nothing is compiled. Without a GPU or without Triton
    it returns 0. An error is logged and ends it: kernels that are left are compiled when they are launched.
    """
    if device.type != "cuda" or not keys or "triton" not in sys.modules:
        return 0
    from triton.runtime import driver

    started, recorder, keys, noted = time.monotonic(), Recorder(device), sorted(keys), _Noted()

    def note(key: Any) -> list[_Kernel]:
        inputs = build(key)
        with noted.instead_of_compiling():
            recorder.rehearse(forward, inputs, piecewise=key.piecewise)
        return noted.take()

    try:
        kernels = note(keys[0])
        if all(_on_disk(kernel) for kernel in kernels):
            return 0
        target = driver.active.get_current_target()
        with _Workers((target.backend, target.arch, target.warp_size)) as workers:
            workers.compile(kernels)
            for key in keys[1:]:
                workers.compile(note(key))
    except Exception as error:
        log.warning("kernels are compiled one after another, because of %s: %s", type(error).__name__, error)
        return 0
    torch.cuda.empty_cache()  # the memory of the graphs that were thrown away
    log.info("compiled %d kernels in %.1f s", workers.compiled, time.monotonic() - started)
    return workers.compiled


class _Kernel(NamedTuple):
    """A kernel that Triton would compile: see `Request`."""

    function: Any
    module: str
    name: str
    data: str


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


class _Workers:
    """Processes that compile kernels. Leaving the context waits for them; ``compiled`` counts what they compiled."""

    def __init__(self, target: tuple[str, int, int]):
        self.target, self.compiled = target, 0
        self._kernels: SimpleQueue[_Kernel | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._processes = [self._start() for _ in range(min(os.cpu_count() or 1, MAX_WORKERS))]
        self._threads = [threading.Thread(target=self._serve, args=(each,)) for each in self._processes]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _start() -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "minisgl.kernel.compile_worker"]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(command, env=environment, text=True, **pipes)  # type: ignore[call-overload, no-any-return]

    def compile(self, kernels: Sequence[_Kernel]) -> None:
        """Let the next free processes compile the kernels."""
        for kernel in kernels:
            self._kernels.put(kernel)

    def _serve(self, process: subprocess.Popen[str]) -> None:
        """Give kernels to a process until there are no more, or until it dies."""
        assert process.stdin is not None and process.stdout is not None
        with process.stdin as requests, process.stdout as answers:
            while (kernel := self._kernels.get()) is not None:
                try:
                    requests.write(Request(kernel.module, kernel.name, kernel.data, self.target).encode())
                    requests.flush()
                    answer = answers.readline().strip()
                except OSError:
                    return
                if not answer:
                    return
                if answer != "ok":
                    log.debug("%s.%s was not compiled ahead: %s", kernel.module, kernel.name, answer)
                with self._lock:
                    self.compiled += answer == "ok"

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        if kind is not None:
            for process in self._processes:
                process.kill()
        for _ in self._threads:
            self._kernels.put(None)
        for thread, process in zip(self._threads, self._processes, strict=True):
            thread.join()
            process.wait()
