"""The engine of one rank: executes steps, one after another, on one device.

It keeps the steps in flight; a `ModelRunner` computes them. `minisgl.engine.build` makes both. Requests, queues and the
ownership of pages belong to the scheduler. All device state changes on one stream, in the order of the steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from minisgl.config import Config
from minisgl.core import EngineDeadError, Step, StepResult, TokenMasks
from minisgl.engine.inputs import Download
from minisgl.engine.model_runner import Forward, ModelRunner, StepRunner
from minisgl.engine.setup import explain_out_of_memory
from minisgl.models.converter import Kernels

if TYPE_CHECKING:
    from minisgl.engine.ranks import Peers

log = logging.getLogger(__name__)


class _LaunchedStep(NamedTuple):
    """A launched step whose result the scheduler has not read yet. ``names`` are those of the downloaded tensors."""

    step: Step
    names: Sequence[str]
    download: Download


class TorchEngine:
    """Engine of one tensor-parallel rank; implements `minisgl.core.Engine`.

    ``runner`` computes the steps: ``model_runner`` itself, or an object of the group `graph`, or of another plugin,
    that wraps it. ``graph`` is the part of the group `graph` (`plugins/graph`), or None. ``peers`` are rank 0's
    connections to the other ranks, if there are any: `launch` sends each step to them first (promise 7), so the
    scheduler need not know how many ranks there are. SGLang broadcasts the requests instead (`recv_requests`), and
    every rank schedules.
    """

    def __init__(self, model_runner: ModelRunner, runner: StepRunner, graph: Any, eos_ids: frozenset[int]):
        self.model_runner, self.runner, self.graph, self.eos_ids = model_runner, runner, graph, eos_ids
        self.spec, self.ctx, self.comm = model_runner.spec, model_runner.ctx, model_runner.ctx.comm
        self.device, self.dtype = model_runner.device, model_runner.ctx.dtype
        self.rank, self.size = model_runner.rank, model_runner.size
        self.model, self.attention = model_runner.model, model_runner.attention
        self.kernels: Kernels = Kernels()  # the part of the group `kernels` that converted model and sampler
        self.peers: Peers | None = None  # set when the other ranks can receive steps
        self._in_flight: deque[_LaunchedStep] = deque()
        self._unsampled: Forward | None = None  # the step that waits for `sample`
        self._failed = self._closed = False
        self._stream: torch.cuda.Stream | None = None

    def start(self, config: Config) -> None:
        """Make the runner ready for the first step. Raises `ConfigError` if there is too little memory for it."""
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)
            # Weights, KV pool and page table were written on the default stream.
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._computing(), explain_out_of_memory(config):
            self.runner.start()

    # ---- one step -------------------------------------------------------------------------------

    def launch(self, step: Step) -> None:
        """Execute the step: asynchronously on CUDA, synchronously on a CPU.

        A step with ``late_sampling`` ends with its forward pass on rank 0. Another rank waits, on its device, for the
        tokens that rank 0 samples.

        Raises `EngineDeadError` if the engine is closed, if the launch fails, if another rank is gone, or if the
        preceding step waits for `sample`. On CUDA, a failure that the device reports later is raised by `result`.
        """
        if self._closed:
            raise EngineDeadError("the engine was closed")
        if self._unsampled is not None:
            waiting = self._unsampled.step.id
            raise EngineDeadError(f"step {step.id} was launched, but step {waiting} waits for sample()")
        with self._computing():
            self._launch(step)

    def _launch(self, step: Step) -> None:
        if self.peers is not None:
            self.peers.send(step.encode())
        self.runner.begin(step)
        forward = self.runner.forward(step)
        if step.late_sampling and self.rank == 0:
            self._unsampled = forward
        else:
            self._sample(forward, None)

    def sample(self, masks: TokenMasks) -> None:
        """Sample the tokens of the step launched last, whose ``late_sampling`` is set, under ``masks``.

        The masks are not sent to the other ranks: they receive the tokens that rank 0 samples.

        Raises `EngineDeadError` if the engine is closed, if no step waits for this call, or if the launch fails. Raises
        ValueError for masks that do not fit the step.
        """
        if self._closed:
            raise EngineDeadError("the engine was closed")
        forward = self._unsampled
        if forward is None:
            raise EngineDeadError("sample() was called, but no launched step waits for it")
        self._check_masks(masks, int(forward.step.num_sampled_tokens.sum()))
        self._unsampled = None
        with self._computing():
            self._sample(forward, masks)

    def _sample(self, forward: Forward, masks: TokenMasks | None) -> None:
        """Choose the tokens of a step on rank 0, give them to all ranks, and start the download of the result."""
        tensors = self.runner.sample(forward, masks)
        download = Download(list(tensors.values()), self._stream)
        self._in_flight.append(_LaunchedStep(forward.step, list(tensors), download))

    def result(self) -> StepResult:
        """Wait for the oldest step in flight and return its tokens and log-probabilities.

        Raises `EngineDeadError` if the step failed on the device, if no step is in flight, or if the only step in
        flight waits for `sample`. Raises it too if a rank of ``peers`` that is watched exits before the result is
        ready: rank 0's GPU would wait for that rank without end (`Peers.wait`).
        """
        if not self._in_flight:
            if self._unsampled is not None:
                raise EngineDeadError(f"result() was called, but step {self._unsampled.step.id} waits for sample()")
            raise EngineDeadError("result() was called, but no step is in flight: every launched step was read")
        launched = self._in_flight.popleft()
        with self._failing(f"step {launched.step.id}"):
            if self.peers is not None:
                self.peers.wait(launched.download.ready)
            arrays = launched.download.arrays()
        return self.runner.read(launched.step, dict(zip(launched.names, arrays, strict=True)))

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Run the body on the engine's stream and without autograd; see `_failing` for its errors."""
        stream: Any = torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()
        with self._failing(f"rank {self.rank}"), torch.inference_mode(), stream:
            yield

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """Record that the engine is dead if the body raises an exception. Turn a RuntimeError into `EngineDeadError`.

        The engine is dead after a KeyboardInterrupt too: a step may have reached some ranks only.
        """
        try:
            yield
        except BaseException as error:
            self._failed = True
            if isinstance(error, RuntimeError) and not isinstance(error, EngineDeadError):
                raise EngineDeadError(f"{what} failed on {self.device}: {error}") from error
            raise

    def _check_masks(self, masks: TokenMasks, num_sampled: int) -> None:
        """Raise ValueError if ``masks`` do not fit a step with ``num_sampled`` sampled positions."""
        expected = (len(masks.positions), -(-self.spec.vocab_size // 32))
        if masks.bits.shape != expected:
            raise ValueError(f"the bits of the masks have the shape {masks.bits.shape}; expected {expected}")
        wrong = masks.positions[(masks.positions < 0) | (masks.positions >= num_sampled)]
        if len(wrong):
            raise ValueError(f"a mask is for position {wrong[0]}; the step samples at {num_sampled} positions")

    # ---- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Release graphs, communicator, weights and KV pool, and end the other ranks. Further launches raise.

        If a rank failed while computing on GPUs, or a step was broken off, rank 0's engine is abandoned instead: its
        GPU memory is released only when this process exits. A second call does nothing, or ends what an exception left.
        """
        peers = self.peers
        failed = peers is not None and (self._failed or bool(peers.exited()))
        if peers is not None:
            peers.end()
        try:
            if self._closed:
                return
            self._closed = True
            if failed and self.device.type == "cuda":
                self._abandon()
            else:
                self._release()
        finally:
            if peers is not None:
                peers.close(failed)

    def _release(self) -> None:
        self._release_followers()
        self.runner.close()
        self.comm.close()
        self._in_flight.clear()
        self.ctx.pool = None
        for attribute in ("model", "attention", "graph", "runner", "model_runner"):
            delattr(self, attribute)
        self.ctx.attention = self.ctx.part = None  # type: ignore[assignment]
        if self.device.type == "cuda":
            gc.collect()  # modules and attention backends refer to each other in cycles
            torch.cuda.empty_cache()

    def _release_followers(self) -> None:
        """Send the other ranks the tokens of a step that will not be sampled, because they wait for them."""
        forward, self._unsampled = self._unsampled, None
        if self.size > 1 and forward is not None and forward.sampling is not None:
            with contextlib.suppress(EngineDeadError), self._computing():  # a rank that has exited needs no release
                self.comm.broadcast(torch.zeros_like(forward.sampling.req_pool_indices, dtype=torch.int64), src=0)

    def _abandon(self) -> None:
        """Release nothing, because another rank failed.

        The device may be blocked in a collective with that rank, and releasing graphs, the communicator or memory would
        wait for the device. All of it is released when this process exits.
        """
        # An extra reference keeps the engine from being collected: destructors of graphs and communicator can block.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
