"""Compilation of the Triton kernels of all buckets at once, on all cores, before the buckets are recorded.

Triton compiles a kernel when it is first launched, one after another: on a machine without compiled kernels on disk,
the recording of the buckets waits for some sixty kernels. So `compile_ahead` records each bucket's forward pass before,
in a CUDA graph that is thrown away, so that no operation is executed, and with launches of Triton kernels that only
compile, in threads. Most of a compilation is LLVM, ptxas and the C compiler of the launcher, which run beside Python.
The recording then finds all kernels compiled.

If the kernels of the first bucket are on disk, so are the others, and nothing more is done.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from minisgl.engine.record import Recorder

__all__ = ["compile_ahead"]

log = logging.getLogger(__name__)

MAX_THREADS = 32
"""The largest number of threads that compile. A compilation keeps a core busy, and needs up to 500 MB of memory."""


def compile_ahead(
    device: torch.device, keys: Sequence[Any], build: Callable[[Any], Any], forward: Callable[[Any], torch.Tensor]
) -> int:
    """Compile the Triton kernels that ``forward(build(key))`` launches, for all keys. Return how many were compiled.

    No kernel is executed, and ``forward`` must be a forward pass that can be recorded (`minisgl.engine.record`). On a
    device without Triton, or with a version of Triton that can't compile in threads, it does nothing and returns 0.
    An error is logged and ends it: the kernels that are left are compiled when they are launched.
    """
    if device.type != "cuda" or not keys:
        return 0
    try:
        from triton.runtime._async_compile import AsyncCompileMode
        from triton.runtime.jit import JITFunction
    except ImportError:
        return 0
    started, recorder, keys = time.monotonic(), Recorder(device), sorted(keys)
    with _Threads() as threads:
        try:
            for part in (keys[:1], keys[1:]):
                with AsyncCompileMode(threads, ignore_errors=True):
                    for key in part:
                        inputs = build(key)
                        with _only_compiling(JITFunction):
                            recorder.rehearse(forward, inputs, piecewise=key.piecewise)
                if not threads.compiled:  # the kernels are on disk
                    return 0
        except Exception as error:
            log.warning("kernels are compiled one after another, because of %s: %s", type(error).__name__, error)
    torch.cuda.empty_cache()  # the memory of the graphs that were thrown away
    log.info("compiled %d kernels in %.1f s", threads.compiled, time.monotonic() - started)
    return threads.compiled


class _Threads(ThreadPoolExecutor):
    """Threads that compile kernels. ``compiled`` counts those that were not on disk."""

    def __init__(self) -> None:
        super().__init__(min(os.cpu_count() or 1, MAX_THREADS), thread_name_prefix="compile")
        self.compiled = 0
        self._knobs: Any = None
        self._listener: Any = None

    def __enter__(self) -> _Threads:
        from triton import knobs

        self._knobs, self._listener = knobs.compilation, knobs.compilation.listener
        knobs.compilation.listener = self._count
        return self

    def __exit__(self, *error: Any) -> None:
        self._knobs.listener = self._listener
        super().__exit__(*error)

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        """Compile a kernel and its launcher in a thread."""
        return super().submit(self._compile, compile_kernel)

    def _compile(self, compile_kernel: Callable[[], Any]) -> Any:
        from triton.runtime import driver

        kernel = compile_kernel()
        driver.active.launcher_cls(kernel.src, kernel.metadata)  # leaves the compiled launcher on disk
        return kernel

    def _count(self, *, cache_hit: bool, **compilation: Any) -> None:
        self.compiled += not cache_hit
        if self._listener is not None:
            self._listener(cache_hit=cache_hit, **compilation)


@contextmanager
def _only_compiling(jit_function: Any) -> Iterator[None]:
    """Let launches of Triton kernels compile them, and launch nothing."""
    launch = jit_function.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    jit_function.run = compile_only
    try:
        yield
    finally:
        jit_function.run = launch
