"""Processes that compile Triton kernels for an engine, which `compile_ahead` gives them.

A process needs about four seconds to import torch, so `start_early` starts them before this process itself imports
torch: both imports then take place at the same time. This module imports no torch.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minisgl.plugins.kernels.ops.compile_worker import Request


__all__ = ["CompileWorkers", "early_workers", "start_early", "take_early"]

log = logging.getLogger(__name__)

MAX_WORKERS = 16
"""The largest number of processes that compile. Each needs one core, and 0.7 GB of memory, most of it for torch."""

_early: CompileWorkers | None = None  # started by `start_early`, and not taken yet


class CompileWorkers:
    """Processes that compile kernels into Triton's cache on disk. As a context, it waits for them at its end.

    After an error in the body of the context, the processes are killed. ``compiled`` counts the kernels.
    """

    def __init__(self, count: int | None = None):
        self.compiled = 0
        self._requests: SimpleQueue[Request | None] = SimpleQueue()
        self._lock = threading.Lock()
        count = min(os.cpu_count() or 1, MAX_WORKERS) if count is None else count
        self._processes = [self._start() for _ in range(count)]
        self._threads = [threading.Thread(target=self._serve, args=(each,), daemon=True) for each in self._processes]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _start() -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "minisgl.plugins.kernels.ops.compile_worker"]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(command, env=environment, text=True, **pipes)  # type: ignore[call-overload, no-any-return]

    def compile(self, requests: Sequence[Request]) -> None:
        """Let the next free processes compile the kernels."""
        for request in requests:
            self._requests.put(request)

    def _serve(self, process: subprocess.Popen[str]) -> None:
        """Give kernels to a process until there are no more, or until it dies."""
        assert process.stdin is not None and process.stdout is not None
        # A process that has died has closed its pipes: writing, and closing what was not written, raise OSError.
        with suppress(OSError), process.stdin as requests, process.stdout as answers:
            while (request := self._requests.get()) is not None:
                requests.write(request.encode())
                requests.flush()
                if not (answer := answers.readline().strip()):
                    return
                if answer != "ok":
                    log.debug("%s.%s was not compiled ahead: %s", request.module, request.name, answer)
                with self._lock:
                    self.compiled += answer == "ok"

    def kill(self) -> None:
        """End the processes at once."""
        for process in self._processes:
            process.kill()
        self.wait()

    def wait(self) -> None:
        """Wait until all kernels are compiled, and end the processes."""
        for _ in self._threads:
            self._requests.put(None)
        for thread, process in zip(self._threads, self._processes, strict=True):
            thread.join()
            process.wait()

    def __enter__(self) -> CompileWorkers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.wait()
        else:
            self.kill()


def start_early(device: str, tp: int) -> None:
    """Start the processes, if an engine of this process will need them: on a GPU, with an empty cache on disk.

    ``device`` and ``tp`` are the options of these names. With several ranks, kernels are not compiled ahead.
    """
    global _early
    if _early is None and tp == 1 and device != "cpu" and _has_gpu() and cache_is_empty():
        _early = CompileWorkers()


def take_early() -> CompileWorkers | None:
    """Return the processes that `start_early` started, if any. The caller must end them."""
    global _early
    taken, _early = _early, None
    return taken


@contextmanager
def early_workers(device: str, tp: int) -> Iterator[None]:
    """Call `start_early`, and end the processes after the body, if they were not taken."""
    start_early(device, tp)
    try:
        yield
    finally:
        if (workers := take_early()) is not None:
            workers.kill()


def cache_is_empty() -> bool:
    """Return whether Triton's cache on disk has no kernels."""
    home = os.environ.get("TRITON_HOME") or Path.home()
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))
    try:
        return next(folder.iterdir(), None) is None
    except OSError:
        return True


def _has_gpu() -> bool:
    """Return whether this machine has a driver of NVIDIA, and Triton is installed. Imports neither torch nor Triton."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return importlib.util.find_spec("triton") is not None
