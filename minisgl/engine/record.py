"""Recording what a forward pass launches, once, to launch it again as one: what a graph runner is built on.

On a GPU that is a CUDA graph, on a CPU a tape that keeps the same rules (`minisgl.engine.tape`). Which steps are
recorded, on what inputs, and which recording serves a step, is the runner's business.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from minisgl.config import ConfigError
from minisgl.engine.tape import GraphViolation, record

__all__ = ["Recorder", "Recording"]


class Recording(Protocol):
    """``out`` is the recorded result: the same tensor in each replay, overwritten by it."""

    out: Tensor

    def replay(self) -> Tensor:
        """Launch what was recorded, on what the inputs hold now; returns ``out``."""


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, out: Tensor):
        self.graph, self.out = graph, out

    def replay(self) -> Tensor:
        self.graph.replay()
        return self.out


class Recorder:
    """Makes the recordings of one device. On a GPU they share their memory: the result of one is overwritten by the
    replay of any, and the largest should be recorded first, so that the others fit into its memory."""

    def __init__(self, device: torch.device):
        self.device = device
        self._pool: Any = None

    def record(self, forward: Callable[[Any], Tensor], inputs: Any) -> Recording:
        """Run ``forward(inputs)`` and keep its launches. A replay reads the tensors of ``inputs`` where they are now.
        Raises `ConfigError` where, on a CPU, it breaks a rule of graphs."""
        if self.device.type == "cuda":
            return self._record_on_cuda(forward, inputs)
        try:
            return record(partial(forward, inputs), inputs)
        except GraphViolation as error:
            raise ConfigError(
                f"A step can't be recorded: {error}\n  Use another backend for what stands there, or graph=none."
            ) from error

    def _record_on_cuda(self, forward: Callable[[Any], Tensor], inputs: Any) -> Recording:
        stream = torch.cuda.current_stream(self.device)
        with _no_collection():
            forward(inputs)  # once unrecorded: libraries set themselves up in it
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                out = forward(inputs)
        self._pool = self._pool or graph.pool()
        return _CudaRecording(graph, out)


@contextmanager
def _no_collection() -> Iterator[None]:
    """A tensor collected during a capture would be freed inside it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
