"""Recording what a forward pass launches, once, to launch it again as one: what a graph runner is built on.

On a GPU that is a CUDA graph, on a CPU a tape that keeps the same rules (`minisgl.engine.simulated_graph`). Which
steps are recorded, on what inputs, and which recording serves a step, is the runner's business.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from minisgl.config import ConfigError
from minisgl.engine.simulated_graph import GraphViolation, record
from minisgl.kernel.launch import recording

__all__ = ["Recorder", "Recording"]


class Recording(Protocol):
    """``out`` is the recorded result: the same tensor in each replay, overwritten by it."""

    out: Tensor

    def replay(self) -> Tensor:
        """Launch what was recorded, on what the inputs hold now; returns ``out``."""


class _CudaRecording:
    """Graphs, and between them the calls that each replay makes anew: a step in pieces. Whole, it is one graph."""

    def __init__(self, pool: Any):
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None  # the one being recorded
        self._launches: list[Callable[[], None]] = []
        self.out: Tensor

    def begin(self) -> None:
        """What is launched from here on is recorded."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool)
        self._graph = graph

    def end(self) -> None:
        """What was launched since `begin` is a graph."""
        graph, self._graph = self._graph, None
        assert graph is not None
        graph.capture_end()
        self._launches.append(graph.replay)

    def abandon(self) -> None:
        """Something failed: the device records no longer. That it can't make a graph of it is not what went wrong."""
        if self._graph is not None:
            with suppress(RuntimeError):
                self.end()

    def split(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call between two graphs: see `minisgl.kernel.launch.between_pieces`."""
        self.end()
        function(*args, **kwargs)
        # Held, q and out of every layer would keep memory of their own. As in one graph, a later piece may have theirs:
        # by then each replay has read them.
        args, kwargs = pytree.tree_map_only(Tensor, _borrowed, (args, kwargs))
        self._launches.append(partial(function, *args, **kwargs))
        self.begin()

    def replay(self) -> Tensor:
        for launch in self._launches:
            launch()
        return self.out


def _borrowed(x: Tensor) -> Tensor:
    """x where it lies, without a hold on its memory."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    place = {"shape": (span * x.element_size(),), "typestr": "|u1", "data": (x.data_ptr(), False), "version": 3}
    memory = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=place), device=x.device)
    return memory.view(x.dtype).as_strided(x.shape, x.stride())


class Recorder:
    """Makes the recordings of one device. On a GPU they share their memory: the result of one is overwritten by the
    replay of any, and the largest should be recorded first, so that the others fit into its memory."""

    def __init__(self, device: torch.device):
        self.device = device
        self._pool: Any = None

    def record(self, forward: Callable[[Any], Tensor], inputs: Any, *, piecewise: bool = False) -> Recording:
        """Run ``forward(inputs)`` and keep its launches. A replay reads the tensors of ``inputs`` where they are now.
        ``piecewise``: calls marked `minisgl.kernel.launch.between_pieces` are not recorded, but made at each replay.
        Raises `ConfigError` where, on a CPU, it breaks a rule of graphs."""
        if self.device.type == "cuda":
            return self._record_on_cuda(forward, inputs, piecewise)
        try:
            return record(partial(forward, inputs), inputs, piecewise=piecewise)
        except GraphViolation as error:
            raise ConfigError(
                f"A step can't be recorded: {error}\n  Use another backend for what stands there, or graph=none."
            ) from error

    def _record_on_cuda(self, forward: Callable[[Any], Tensor], inputs: Any, piecewise: bool) -> Recording:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        made = _CudaRecording(self._pool)
        with _no_collection():
            forward(inputs)  # once unrecorded: libraries set themselves up in it
            torch.cuda.synchronize(self.device)
            try:
                made.begin()
                with recording(None, made.split if piecewise else None):
                    made.out = forward(inputs)
                made.end()
            except BaseException:
                made.abandon()
                raise
        return made


@contextmanager
def _no_collection() -> Iterator[None]:
    """A tensor collected during a capture would be freed inside it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
