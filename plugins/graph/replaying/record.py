"""Recording of a forward pass: its kernel launches are recorded once and replayed as one launch.

Graph runners are built on this module. On a GPU a recording is a CUDA graph. On a CPU it is a simulated graph, which
enforces the same rules (`simulated_graph.py` here). The graph runner decides which steps are recorded, on which
inputs, and which recording serves a step.
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
from minisgl.plugins.graph.replaying.simulated_graph import GraphViolation, record
from minisgl.plugins.kernels.ops.launch import recording

__all__ = ["Recorder", "Recording"]


class Recording(Protocol):
    """A recorded forward pass. ``out`` is its result: the same tensor for all replays, overwritten by each of them."""

    out: Tensor

    def replay(self) -> Tensor:
        """Launch the recorded operations again, on the current contents of the input buffers. Returns ``out``."""


class _CudaRecording:
    """Recording on a GPU: one CUDA graph, or, recorded in pieces, several graphs with eager calls between them.

    ``pool`` is the memory pool that all graphs of a device share. ``mode`` is CUDA's mode of the capture: "relaxed"
    also permits calls that allocate memory, as a library does that is used for the first time.
    """

    def __init__(self, pool: Any, mode: str = "global"):
        self._pool, self._mode = pool, mode
        self._graph: torch.cuda.CUDAGraph | None = None  # the graph being recorded, if any
        self._launches: list[Callable[[], None]] = []
        self.out: Tensor

    def begin(self) -> None:
        """Begin a CUDA graph: all launches from here on are recorded in the graph."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode=self._mode)
        self._graph = graph

    def end(self) -> None:
        """End the CUDA graph that `begin` began, and append the graph to the launches of a replay."""
        graph, self._graph = self._graph, None
        assert graph is not None
        graph.capture_end()
        self._launches.append(graph.replay)

    def abandon(self) -> None:
        """End the capture after an error in the forward pass, so that the device no longer records.

        Ending a capture that failed raises another RuntimeError. That error is suppressed, because the caller re-raises
        the original one.
        """
        if self._graph is not None:
            with suppress(RuntimeError):
                self.end()

    def split(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """End the current graph, call ``function`` eagerly, and begin the next graph.

        Each replay calls ``function`` with the same arguments between the two graphs: see
        `minisgl.plugins.kernels.ops.launch.between_pieces`.
        """
        self.end()
        function(*args, **kwargs)
        # References to q and out of every layer would keep all their memory allocated. Aliases without a reference let
        # later graphs reuse the memory, which is safe: when they do, a replay no longer needs this q and out.
        args, kwargs = pytree.tree_map_only(Tensor, _unowned_alias, (args, kwargs))
        self._launches.append(partial(function, *args, **kwargs))
        self.begin()

    def replay(self) -> Tensor:
        """Launch the graphs and the eager calls between them, in order. Returns ``out``."""
        for launch in self._launches:
            launch()
        return self.out


def _unowned_alias(x: Tensor) -> Tensor:
    """Return a tensor over the memory of x, with the same shape and strides, that does not keep the memory alive."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    interface = {"shape": (span * x.element_size(),), "typestr": "|u1", "data": (x.data_ptr(), False), "version": 3}
    memory = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=x.device)
    return memory.view(x.dtype).as_strided(x.shape, x.stride())


class Recorder:
    """Factory of the recordings of one device.

    On a GPU all recordings share one memory pool. So any replay may overwrite the results of other recordings.
    Record the largest bucket first: smaller recordings then reuse its memory.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._pool: Any = None

    def record(self, forward: Callable[[Any], Tensor], inputs: Any, *, piecewise: bool = False) -> Recording:
        """Run ``forward(inputs)`` and record its launches. A replay reads the tensors of ``inputs`` at their addresses.

        With ``piecewise``, calls of functions marked `minisgl.plugins.kernels.ops.launch.between_pieces` are not
        recorded: each replay makes them again. Raises `ConfigError` if, on a CPU, the forward pass breaks a rule of
        CUDA graphs.
        """
        if self.device.type == "cuda":
            return self._record_on_cuda(forward, inputs, piecewise)
        try:
            return record(partial(forward, inputs), inputs, piecewise=piecewise)
        except GraphViolation as error:
            raise ConfigError(
                f"A step can't be recorded: {error}\n"
                "  Choose another backend for the operation at that source line, or use graph=none."
            ) from error

    def _record_on_cuda(self, forward: Callable[[Any], Tensor], inputs: Any, piecewise: bool) -> Recording:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        made = _CudaRecording(self._pool)
        with _no_collection():
            forward(inputs)  # a first run without recording, in which libraries initialise themselves
            torch.cuda.synchronize(self.device)
            self._fill(made, forward, inputs, piecewise)
        return made

    def rehearse(self, forward: Callable[[Any], Tensor], inputs: Any, *, piecewise: bool) -> None:
        """Record ``forward(inputs)`` on a GPU and throw the recording away.

        Nothing of it is executed but calls between the pieces, if ``piecewise``.
        """
        with _no_collection():
            self._fill(_CudaRecording(torch.cuda.graph_pool_handle(), "relaxed"), forward, inputs, piecewise)

    @staticmethod
    def _fill(made: _CudaRecording, forward: Callable[[Any], Tensor], inputs: Any, piecewise: bool) -> None:
        """Record ``forward(inputs)`` in ``made``."""
        try:
            made.begin()
            with recording(None, made.split if piecewise else None):
                made.out = forward(inputs)
            made.end()
        except BaseException:
            made.abandon()
            raise


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable the garbage collector: a tensor that is collected during a capture would be freed inside the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
