"""Model runner of one rank (SGLang: `ModelRunner`): executes steps, one after another, on one device.

Knows the model, the KV pool, the page table and the last token of each request-pool row. Requests, queues and the
ownership of pages belong to the scheduler. All device state changes on one stream, in the order of the steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from minisgl.attention import AttentionBackend, AttnBatch
from minisgl.config import Config
from minisgl.core import EngineDeadError, EngineSpec, Step, StepResult
from minisgl.engine import setup
from minisgl.engine.graph import StaticInputs
from minisgl.engine.inputs import InputBuilder, ModelInputs, PiecewiseInputBuffers, SamplingInputs
from minisgl.engine.kv_sizing import size_pool
from minisgl.engine.piecewise import PiecewiseAttention
from minisgl.engine.sampler import Sampled, SamplePlan, Sampler, read_logprobs
from minisgl.engine.transfer import Download
from minisgl.kvcache.pool import KVPool
from minisgl.layers.context import Context

if TYPE_CHECKING:
    from minisgl.plugin_manager.manager import PluginManager

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 2.0
"""Shortest time in seconds between two progress messages in the log while graphs are recorded."""


@dataclass(slots=True)
class _LaunchedStep:
    """A launched step whose result the scheduler has not read yet. ``plan`` is None if no row samples."""

    step: Step
    plan: SamplePlan | None
    download: Download


class TorchEngine:
    """Engine of one tensor-parallel rank; implements `minisgl.core.Engine`.

    ``size`` is the number of ranks. If it is above 1, ``address`` is ``host:port`` of rank 0's rendezvous. Raises
    `ConfigError` if the options do not fit the model, the attention backend or the machine.
    """

    def __init__(self, config: Config, manager: PluginManager, *, rank: int = 0, size: int = 1, address: str = ""):
        self.rank, self.size = rank, size
        self.device = setup.resolve_device(config, rank)
        path, model_config = setup.read_model(config)
        self.dtype = setup.resolve_dtype(config, model_config, self.device)
        max_seq_len = setup.resolve_max_seq_len(config, model_config)
        self.eos_ids = setup.eos_ids(path)
        self._in_flight: deque[_LaunchedStep] = deque()
        self._closed = False

        self.attention: AttentionBackend = setup.build_attention(config, manager, self.device, self.dtype)
        self.comm = manager.build(
            "communicator", config.communicator, rank=rank, size=size, address=address, device=self.device
        )
        moe = manager.build("moe", config.moe, device=self.device) if model_config.num_experts else None
        self.graph = manager.build("graph", config.graph, device=self.device)
        piecewise = getattr(self.graph, "piecewise", lambda max_tokens: ())(setup.max_step_tokens(config, max_seq_len))
        self._piecewise = PiecewiseAttention(self.attention) if piecewise else None
        self.ctx = Context(self.comm, self._piecewise or self.attention, moe, self.device, self.dtype)
        started = time.monotonic()
        log.info("loading weights of %s (%s, %s) from %s", model_config.architecture, self.dtype, self.device, path)
        self.model = setup.build_model(config, manager, path, model_config, self.ctx)
        log.info("loaded weights in %.1f s", time.monotonic() - started)

        layers = self.model.attention_layers()
        needs = self.attention.needs()
        shape = (len(layers), config.page_size, layers[0].kv_heads, layers[0].head_dim)
        pages = size_pool(config, KVPool.page_bytes(*shape, self.dtype), max_seq_len, self.device, needs.workspace)
        pages = min(int(n) for n in self.comm.exchange(str(pages).encode()))  # page numbers must be valid on all ranks
        self.spec = EngineSpec(
            page_size=config.page_size,
            num_pages=pages,
            max_running_requests=config.max_running_requests,
            max_seq_len=max_seq_len,
            vocab_size=model_config.vocab_size,
        )
        self.ctx.pool = KVPool(shape[0], pages + 1, *shape[1:], self.dtype, self.device, needs.layout)
        tokens, gib = pages * config.page_size, self.ctx.pool.nbytes / 2**30
        log.info("KV pool: %d pages of %d tokens (%d tokens, %.2f GiB)", pages, config.page_size, tokens, gib)
        self.sampler = Sampler(self.spec.max_running_requests, self.spec.vocab_size, self.device)
        self._inputs = InputBuilder(self.spec, self.device, detect_shared_prefix=needs.shared_prefix)
        # [request-pool rows, the scratch row included]: the token that the row sampled last.
        self._last_token_ids = torch.zeros(self.spec.max_running_requests + 1, dtype=torch.int64, device=self.device)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        keys = self.graph.buckets(self.spec.max_running_requests) if needs.graph else ()
        if needs.shared_prefix:  # only for multiples of 32 rows: padding costs less than more recordings
            keys = [*keys, *(key._replace(shared_prefix=True) for key in keys if key.rows % 32 == 0)]
        self._buffers: dict[Any, StaticInputs] = {}
        self._piecewise_buffers: dict[Any, PiecewiseInputBuffers] = {}
        if self._stream is not None:  # weights, KV pool and page table were written on the default stream
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._computing(), setup.explain_out_of_memory(config):
            # `bind` may launch kernels, so it runs on this rank's device and stream, as a step does.
            self.attention.bind(self.ctx.pool, layers, keys)
            self._capture([*keys, *piecewise])

    def _capture(self, keys: Sequence[Any]) -> None:
        """Let the graph runner record every bucket, and log the progress."""
        started = last_logged = time.monotonic()
        begun = 0

        def make_buffers(key: Any) -> StaticInputs | PiecewiseInputBuffers:
            nonlocal begun, last_logged
            if time.monotonic() - last_logged > PROGRESS_SECONDS:
                last_logged = time.monotonic()
                log.info("recorded %d of %d graphs", begun, len(keys))
            begun += 1
            return self._make_buffers(key)

        self.graph.capture(keys, make_buffers, self._forward_buffers)
        if keys:
            log.info("recorded %d graphs in %.1f s", len(keys), time.monotonic() - started)

    # ---- the protocol ---------------------------------------------------------------------------

    def launch(self, step: Step) -> None:
        """Execute the step: asynchronously on CUDA, synchronously on a CPU.

        Raises `EngineDeadError` if the engine is closed or the launch fails. On CUDA, a failure that the device reports
        later is raised by `result`.
        """
        if self._closed:
            raise EngineDeadError("the engine was closed")
        with self._computing():
            self._launch(step)

    def result(self) -> StepResult:
        """Wait for the oldest step in flight and return its tokens and log-probabilities.

        Raises `EngineDeadError` if the step failed on the device, or if no step is in flight.
        """
        if not self._in_flight:
            raise EngineDeadError("result() was called, but no step is in flight: every launched step was read")
        launched = self._in_flight.popleft()
        step, plan = launched.step, launched.plan
        try:
            arrays = launched.download.arrays()
        except RuntimeError as error:
            raise EngineDeadError(f"step {step.id} failed on {self.device}: {error}") from error
        tokens = np.zeros((step.rows, 1), np.int32)
        logprobs = None
        if arrays:
            tokens[step.sample, 0] = arrays[0]
        if plan is not None and len(arrays) > 1:
            entries: list[Any] = [None] * step.rows
            rows = np.flatnonzero(step.sample)
            for row, entry in zip(rows, read_logprobs(plan, *arrays[1:]), strict=True):
                entries[row] = entry
            logprobs = tuple(entries)
        return StepResult(step.id, tokens, step.sample.astype(np.int32), logprobs)

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
        self.graph.close()
        self.comm.close()
        self._in_flight.clear()
        self._buffers.clear()
        self._piecewise_buffers.clear()
        self.ctx.pool = None
        for attribute in ("model", "attention", "_piecewise", "graph", "sampler", "_inputs"):
            delattr(self, attribute)
        self.ctx.attention = self.ctx.moe = None  # type: ignore[assignment]
        if self.device.type == "cuda":
            gc.collect()  # modules and attention backends refer to each other in cycles
            torch.cuda.empty_cache()

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
        sampling = self.rank == 0  # other ranks receive rank 0's sampled tokens and keep no sampling state
        if sampling:
            self.sampler.admit(step.admissions)
        self._inputs.update_page_table(step)
        plan = self.sampler.plan(step.req_pool_indices[step.sample]) if step.sample.any() else None
        ready = self._compute(step, plan)
        if ready is None:
            self._in_flight.append(_LaunchedStep(step, None, Download([])))
            return
        logits, inputs = ready
        if sampling:
            sampled = self.sampler.sample(logits, inputs.req_pool_indices, inputs.positions, inputs.plan, inputs.groups)
        else:
            sampled = Sampled(torch.empty(len(inputs.req_pool_indices), dtype=torch.int64, device=self.device))
        if self.size > 1:
            sampled = sampled._replace(tokens=self.comm.broadcast(sampled.tokens, src=0))
        self._last_token_ids.index_put_((inputs.req_pool_indices,), sampled.tokens)
        tensors = [t for t in sampled if t is not None]
        self._in_flight.append(_LaunchedStep(step, plan, Download(tensors, self._stream)))

    def _compute(self, step: Step, plan: SamplePlan | None) -> tuple[Tensor, SamplingInputs] | None:
        """Run the forward pass with the fewest launches: graph replay, replay in pieces, or operation by operation.

        Returns the logits [sampled rows, vocab] and the inputs of sampling, or None if no row of the step samples.
        """
        key = self.graph.pick(step.rows, 1, step.num_decode == step.rows)
        if key is not None:
            return self._replay(step, key, plan)
        key = self.graph.pick_tokens(len(step.input_ids)) if self._piecewise is not None else None
        return self._forward(step, plan, key)

    def _forward(self, step: Step, plan: SamplePlan | None, key: Any) -> tuple[Tensor, SamplingInputs] | None:
        """Run the step in pieces, if ``key`` is a bucket for its number of tokens, or else operation by operation.

        Returns the same as `_compute`.
        """
        tokens, batch = self._inputs.build(step)
        self.attention.plan(batch)
        inputs = None if plan is None else self._inputs.sampling_inputs(step, plan, batch)
        if key is not None:
            indices = None if inputs is None else inputs.last_token_indices
            if inputs is not None and indices is None:  # each row has one token; leave out the padding
                indices = batch.cu_seqlens_q[1:] - 1
            hidden = self._replay_pieces(key, tokens, indices)
        else:
            # If no row samples, the step only writes KV. The model still needs an index: pass token 0 as a dummy.
            hidden = self.model.forward(
                *self._resolve(tokens), batch.cu_seqlens_q[:1] if inputs is None else inputs.last_token_indices
            )
        return None if inputs is None else (self.model.logits(hidden), inputs)

    def _resolve(self, tokens: ModelInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return token ids, positions and out_cache_loc (KV locations to write), int64 [tokens] each.

        A PENDING id is replaced by the token that its request-pool row sampled last.
        """
        input_ids, positions, out_cache_loc, req_pool_indices = tokens.packed[:4].long().unbind()
        if tokens.pending:
            input_ids = torch.where(input_ids < 0, self._last_token_ids.index_select(0, req_pool_indices), input_ids)
        return input_ids, positions, out_cache_loc

    # ---- graphs ---------------------------------------------------------------------------------

    def _make_buffers(self, key: Any) -> StaticInputs | PiecewiseInputBuffers:
        """Allocate the static input buffers of a bucket, filled with padding.

        For a decode bucket also plan attention over the padding rows, because attention is part of the recording.
        """
        if key.piecewise:
            self._piecewise_buffers[key] = PiecewiseInputBuffers(key, self.spec, self.device)
            return self._piecewise_buffers[key]
        factory = getattr(self.graph, "input_buffers", None)
        buffers: StaticInputs = (
            factory(key, self.spec, self._inputs.page_table, self.device)
            if factory is not None
            else self._inputs.graph_buffers(key)
        )
        self._buffers[key] = buffers
        self._plan(buffers.fill(None), key)
        return buffers

    def _plan(self, batch: AttnBatch, key: Any) -> None:
        """Plan attention for a bucket. A shared-prefix bucket gets the prefix length as a static device buffer."""
        if key.shared_prefix:
            batch = replace(batch, shared_prefix_len=self._inputs.shared_prefix_len)
        self.attention.plan(batch)

    def _forward_buffers(self, buffers: StaticInputs | PiecewiseInputBuffers) -> Tensor:
        """Run the forward pass that a graph records, on static buffers only.

        Returns logits [bucket rows, vocab] for a decode bucket. For a piecewise bucket, returns the hidden states of
        the tokens in ``buffers.last_token_indices``, or of all tokens if this attribute is None.
        """
        if not isinstance(buffers, PiecewiseInputBuffers):
            return self.model.logits(self.model.forward(*self._resolve(buffers.tokens)))
        assert self._piecewise is not None
        with self._piecewise.in_bucket(0):
            return self.model.forward(*self._resolve(buffers.tokens), buffers.last_token_indices)

    def _replay(self, step: Step, key: Any, plan: SamplePlan | None) -> tuple[Tensor, SamplingInputs] | None:
        """Pad a decode step up to its bucket and replay the bucket's graph. Returns the same as `_compute`."""
        if self._inputs.find_shared_prefix(step):
            key = min((k for k in self._buffers if k.shared_prefix and k.rows >= step.rows), default=key)
        batch = self._buffers[key].fill(self._inputs.decode_rows(step))
        self._plan(batch, key)
        logits = self.graph.run(key)
        return None if plan is None else (logits[: step.rows], self._inputs.sampling_inputs(step, plan, batch))

    def _replay_pieces(self, key: Any, tokens: ModelInputs, indices: Tensor | None) -> Tensor:
        """Replay the pieces recorded for bucket ``key`` on the step's tokens; attention between them runs eagerly.

        Returns the hidden states of the tokens in ``indices`` int32. If ``indices`` is None (no row samples), the
        contents of the result are meaningless.
        """
        buffers = self._piecewise_buffers[key]
        buffers.fill(tokens, indices)
        assert self._piecewise is not None
        with self._piecewise.in_bucket(tokens.packed.shape[1]):
            hidden: Tensor = self.graph.run(key)
        if indices is None:
            return hidden
        return hidden[: len(indices)] if buffers.last_token_indices is not None else hidden.index_select(0, indices)
