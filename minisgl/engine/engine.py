"""The engine of one rank: executes steps, one after another, on one device.

It loads the model, sizes the KV pool, and keeps the steps in flight. A `ModelRunner` computes them. Requests, queues
and the ownership of pages belong to the scheduler. All device state changes on one stream, in the order of the steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from minisgl.attention import AttentionBackend
from minisgl.config import Config
from minisgl.core import EngineDeadError, EngineSpec, Step, StepResult, TokenMasks
from minisgl.distributed import Communicator
from minisgl.distributed.group import GroupCommunicator
from minisgl.engine import setup
from minisgl.engine.graph import GraphRunner
from minisgl.engine.inputs import InputBuilder
from minisgl.engine.kv_sizing import size_pool
from minisgl.engine.model_runner import Forward, ModelRunner, StepRunner
from minisgl.engine.sampler import SamplePlan, state_bytes
from minisgl.engine.transfer import Download
from minisgl.kvcache.pool import KVPool
from minisgl.layers.context import Context
from minisgl.models.converter import Kernels
from minisgl.models.generation_config import eos_ids

if TYPE_CHECKING:
    from minisgl.plugin_manager.manager import PluginManager

log = logging.getLogger(__name__)


class _LaunchedStep(NamedTuple):
    """A launched step whose result the scheduler has not read yet. ``names`` are those of the downloaded tensors."""

    step: Step
    plan: SamplePlan | None  # None: no row samples
    names: Sequence[str]
    download: Download


class TorchEngine:
    """Engine of one tensor-parallel rank; implements `minisgl.core.Engine`.

    ``size`` is the number of ranks. If it is above 1, ``address`` is ``host:port`` of rank 0's rendezvous.
    ``local_size`` of them are on this machine, where this rank has the number ``local_rank``; by default all are.
    Raises `ConfigError` if the options do not fit the model, the attention backend or the machine.
    """

    def __init__(
        self,
        config: Config,
        manager: PluginManager,
        *,
        rank: int = 0,
        size: int = 1,
        address: str = "",
        local_rank: int | None = None,
        local_size: int | None = None,
    ):
        self.rank, self.size = rank, size
        local_size = size if local_size is None else local_size
        self.device = setup.resolve_device(config, rank if local_rank is None else local_rank, local_size)
        path, model_config = setup.read_model(config)
        self.dtype = setup.resolve_dtype(config, model_config, self.device)
        max_seq_len = setup.resolve_max_seq_len(config, model_config)
        self.eos_ids = eos_ids(path)
        self._in_flight: deque[_LaunchedStep] = deque()
        self._unsampled: Forward | None = None  # the step that waits for `sample`
        self._closed = False

        self.attention: AttentionBackend = setup.build_attention(config, manager, self.device, self.dtype)
        ranks: dict[str, Any] = {"rank": rank, "size": size, "address": address, "device": self.device}
        self.comm: Communicator = (
            GroupCommunicator(300.0, **ranks)
            if config.communicator is None
            else manager.build("communicator", config.communicator, local_size=local_size, **ranks)
        )
        moe = setup.build_moe(config, manager, model_config, self.device)
        self.graph: GraphRunner | None = None
        if config.graph is not None:
            self.graph = manager.build("graph", config.graph, device=self.device)
        self.kernels: Kernels = Kernels()
        if config.kernels is not None:
            self.kernels = manager.build("kernels", config.kernels, device=self.device)
        quantization = setup.build_quantization(config, manager, path, model_config, self.device, self.dtype)
        max_step_tokens = setup.max_step_tokens(config, max_seq_len)
        attention = self.attention
        if self.graph is not None:
            attention = self.graph.wrap_attention(attention, max_step_tokens)
        self.ctx = Context(self.comm, attention, moe, self.device, self.dtype)
        started = time.monotonic()
        log.info("loading weights of %s (%s, %s) from %s", model_config.architecture, self.dtype, self.device, path)
        self.model = setup.build_model(config, manager, path, model_config, self.ctx, quantization, [self.kernels])
        log.info("loaded weights in %.1f s", time.monotonic() - started)
        if quantization is not None and isinstance(self.model, torch.nn.Module):
            quantization.prepare(self.model, max(max_step_tokens, config.max_running_requests))

        manager.load_for_options(config)
        wrappers = manager.hook.minisgl_wrap_runner(config=config, max_seq_len=max_seq_len, device=self.device)
        self.spec = self._allocate_pool(config, max_seq_len, model_config.vocab_size)
        self.model_runner = ModelRunner(
            self.model, self.attention, self.ctx, self.spec, max_step_tokens=max_step_tokens, rank=rank, size=size
        )
        self.kernels.convert_sampler(self.model_runner.sampler)
        self.runner: StepRunner = self.model_runner if self.graph is None else self.graph.wrap(self.model_runner)
        for wrap in wrappers:
            self.runner = wrap(self.runner, self.model_runner)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        if self._stream is not None:  # weights, KV pool and page table were written on the default stream
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._computing(), setup.explain_out_of_memory(config):
            self.runner.start()

    def _allocate_pool(self, config: Config, max_seq_len: int, vocab_size: int) -> EngineSpec:
        """Allocate the KV pool: as many pages as the options say or as fit, on all ranks. Return the engine's sizes."""
        layers = self.model.attention_layers()
        needs = self.attention.needs()
        shape = (len(layers), config.page_size, layers[0].kv_heads, layers[0].head_dim)
        reserved = needs.workspace + self._state_bytes(config, max_seq_len, vocab_size)
        pages = size_pool(config, KVPool.page_bytes(*shape, self.dtype), max_seq_len, self.device, reserved)
        pages = min(int(n) for n in self.comm.exchange(str(pages).encode()))  # page numbers must be valid on all ranks
        spec = EngineSpec(
            page_size=config.page_size,
            num_pages=pages,
            max_running_requests=config.max_running_requests,
            max_seq_len=max_seq_len,
            vocab_size=vocab_size,
        )
        self.ctx.pool = KVPool(shape[0], pages + 1, *shape[1:], self.dtype, self.device, needs.layout)
        tokens, gib = pages * config.page_size, self.ctx.pool.nbytes / 2**30
        note = "; memory is committed as it is first used" if self.device.type == "cpu" else ""
        log.info("KV pool: %d pages of %d tokens (%d tokens, %.2f GiB%s)", pages, config.page_size, tokens, gib, note)
        return spec

    def _state_bytes(self, config: Config, max_seq_len: int, vocab_size: int) -> int:
        """Return the bytes of device memory for the page table and for sampling. Only rank 0 samples."""
        rows = config.max_running_requests
        sampling = state_bytes(rows, vocab_size) if self.rank == 0 else 0
        page_table = InputBuilder.page_table_row_bytes(max_seq_len, config.page_size)
        return (rows + 1) * (8 + page_table) + sampling

    def warm_up(self, max_tokens: int, *, drafting: bool, rounds: int) -> None:
        """Compute the steps of `StepRunner.warm_up_steps`, which has the same arguments, and wait for their results.

        No step may be in flight. With several ranks, each rank must call this: all compute the same steps.
        """
        started, count = time.monotonic(), 0
        for step in self.runner.warm_up_steps(max_tokens, drafting=drafting, rounds=rounds):
            self.launch(step)
            if step.late_sampling and self.rank == 0:
                bits = np.full((1, -(-self.spec.vocab_size // 32)), -1, np.int32)
                self.sample(TokenMasks(np.zeros(1, np.int32), bits))
            self.result()
            count += 1
        if count:
            log.info("computed %d steps to warm up in %.1f s", count, time.monotonic() - started)

    # ---- the protocol ---------------------------------------------------------------------------

    def launch(self, step: Step) -> None:
        """Execute the step: asynchronously on CUDA, synchronously on a CPU.

        A step with ``late_sampling`` ends with its forward pass on rank 0. Another rank waits, on its device, for the
        tokens that rank 0 samples.

        Raises `EngineDeadError` if the engine is closed, if the launch fails, or if the preceding step waits for
        `sample`. On CUDA, a failure that the device reports later is raised by `result`.
        """
        if self._closed:
            raise EngineDeadError("the engine was closed")
        if self._unsampled is not None:
            waiting = self._unsampled.step.id
            raise EngineDeadError(f"step {step.id} was launched, but step {waiting} waits for sample()")
        with self._computing():
            self._launch(step)

    def sample(self, masks: TokenMasks) -> None:
        """Sample the tokens of the step launched last, whose ``late_sampling`` is set, under ``masks``.

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

    def result(self) -> StepResult:
        """Wait for the oldest step in flight and return its tokens and log-probabilities.

        Raises `EngineDeadError` if the step failed on the device, if no step is in flight, or if the only step in
        flight waits for `sample`.
        """
        if not self._in_flight:
            if self._unsampled is not None:
                raise EngineDeadError(f"result() was called, but step {self._unsampled.step.id} waits for sample()")
            raise EngineDeadError("result() was called, but no step is in flight: every launched step was read")
        launched = self._in_flight.popleft()
        try:
            arrays = launched.download.arrays()
        except RuntimeError as error:
            raise EngineDeadError(f"step {launched.step.id} failed on {self.device}: {error}") from error
        return self.runner.read(launched.step, launched.plan, dict(zip(launched.names, arrays, strict=True)))

    def result_ready(self) -> bool:
        """Return whether `result` would return or raise without waiting."""
        try:
            return not self._in_flight or self._in_flight[0].download.ready()
        except RuntimeError:  # the device failed; `result` raises an error that says how
            return True

    def abandon(self) -> None:
        """Mark the engine closed after another rank failed, without releasing anything.

        The device may be blocked in a collective with the failed rank, and releasing graphs, the communicator or
        memory would wait for the device. All of it is released when this process exits. Further launches raise.
        """
        self._closed = True
        # An extra reference keeps the engine from being collected: destructors of graphs and communicator can block.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def close(self) -> None:
        """Release graphs, communicator, weights and KV pool. Further launches raise. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._release_followers()
        self.runner.close()
        self.comm.close()
        self._in_flight.clear()
        self.ctx.pool = None
        for attribute in ("model", "attention", "graph", "runner", "model_runner"):
            delattr(self, attribute)
        self.ctx.attention = self.ctx.moe = None  # type: ignore[assignment]
        if self.device.type == "cuda":
            gc.collect()  # modules and attention backends refer to each other in cycles
            torch.cuda.empty_cache()

    def _release_followers(self) -> None:
        """Send the other ranks the tokens of a step that will not be sampled, because they wait for them."""
        forward, self._unsampled = self._unsampled, None
        if self.size > 1 and forward is not None and forward.sampling is not None:
            with contextlib.suppress(EngineDeadError), self._computing():  # a rank that has exited needs no release
                self.comm.broadcast(torch.zeros_like(forward.sampling.req_pool_indices, dtype=torch.int64), src=0)

    def _check_masks(self, masks: TokenMasks, num_sampled: int) -> None:
        """Raise ValueError if ``masks`` do not fit a step with ``num_sampled`` sampled positions."""
        expected = (len(masks.positions), -(-self.spec.vocab_size // 32))
        if masks.bits.shape != expected:
            raise ValueError(f"the bits of the masks have the shape {masks.bits.shape}; expected {expected}")
        wrong = masks.positions[(masks.positions < 0) | (masks.positions >= num_sampled)]
        if len(wrong):
            raise ValueError(f"a mask is for position {wrong[0]}; the step samples at {num_sampled} positions")

    # ---- one step -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _computing(self) -> Any:
        """Run the body on the engine's stream, without autograd, and turn each RuntimeError into `EngineDeadError`."""
        stream: Any = torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()
        try:
            with torch.inference_mode(), stream:
                yield
        except EngineDeadError:
            raise
        except RuntimeError as error:
            raise EngineDeadError(f"rank {self.rank} failed on {self.device}: {error}") from error

    def _launch(self, step: Step) -> None:
        self.runner.begin(step)
        forward = self.runner.forward(step)
        if step.late_sampling and self.rank == 0:
            self._unsampled = forward
        else:
            self._sample(forward, None)

    def _sample(self, forward: Forward, masks: TokenMasks | None) -> None:
        """Choose the tokens of a step on rank 0, give them to all ranks, and start the download of the result."""
        tensors = self.runner.sample(forward, masks)
        plan = None if forward.sampling is None else forward.sampling.plan
        download = Download(list(tensors.values()), self._stream)
        self._in_flight.append(_LaunchedStep(forward.step, plan, list(tensors), download))
