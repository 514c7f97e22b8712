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
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.attention import MAX_PROJECTED_ROWS, AttentionBackend, AttnBatch
from minisgl.config import Config
from minisgl.core import PENDING, Admission, EngineDeadError, EngineSpec, Step, StepResult, TokenMasks
from minisgl.engine import setup
from minisgl.engine.inputs import InputBuilder, ModelInputs, PiecewiseInputBuffers
from minisgl.engine.kv_sizing import size_pool
from minisgl.engine.prompt_logprobs import score_prompt
from minisgl.engine.results import read_result
from minisgl.engine.sampler import PENALTY, Sampled, SamplePlan, Sampler, SamplingInputs, state_bytes
from minisgl.engine.transfer import Download
from minisgl.engine.verification import Accepted
from minisgl.kernel.rounds import advance, next_drafts
from minisgl.kvcache.pool import KVPool
from minisgl.layers.context import Context
from minisgl.plugins.graph.replaying.buckets import StaticInputs
from minisgl.plugins.graph.replaying.compile_ahead import Case, compile_ahead
from minisgl.plugins.graph.replaying.piecewise import PiecewiseAttention
from minisgl.plugins.graph.replaying.warmup import steps_with_prompts

if TYPE_CHECKING:
    from minisgl.plugin_manager.manager import PluginManager

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 2.0
"""Shortest time in seconds between two progress messages in the log while graphs are recorded."""


class _Forward(NamedTuple):
    """A step whose forward pass was launched, before it samples.

    ``logits`` [sampled positions, vocab] and ``inputs`` are None if no row samples. ``scores`` is the result of
    `score_prompt`, empty if the step scores no prompts.
    """

    step: Step
    logits: Tensor | None
    inputs: SamplingInputs | None
    scores: dict[str, Tensor]
    key: Any | None = None  # the bucket of decode rows that was replayed; None: the step was not one launch


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
        self.eos_ids = setup.eos_ids(path)
        self._in_flight: deque[_LaunchedStep] = deque()
        self._unsampled: _Forward | None = None  # the step that waits for `sample`
        self._closed = False

        self.attention: AttentionBackend = setup.build_attention(config, manager, self.device, self.dtype)
        self.comm = manager.build(
            "communicator",
            config.communicator,
            rank=rank,
            size=size,
            local_size=local_size,
            address=address,
            device=self.device,
        )
        moe = setup.build_moe(config, manager, model_config, self.device)
        self.graph = manager.build("graph", config.graph, device=self.device)
        piecewise = getattr(self.graph, "piecewise", lambda max_tokens: ())(setup.max_step_tokens(config, max_seq_len))
        self._piecewise = PiecewiseAttention(self.attention) if piecewise else None
        fp8 = setup.build_fp8(config, manager, model_config, self.device)
        self.ctx = Context(self.comm, self._piecewise or self.attention, moe, self.device, self.dtype, fp8)
        started = time.monotonic()
        log.info("loading weights of %s (%s, %s) from %s", model_config.architecture, self.dtype, self.device, path)
        self.model = setup.build_model(config, manager, path, model_config, self.ctx)
        log.info("loaded weights in %.1f s", time.monotonic() - started)
        if fp8 is not None:
            fp8.prepare(self.model, max(setup.max_step_tokens(config, max_seq_len), config.max_running_requests))

        layers = self.model.attention_layers()
        needs = self.attention.needs()
        shape = (len(layers), config.page_size, layers[0].kv_heads, layers[0].head_dim)
        reserved = needs.workspace + self._state_bytes(config, max_seq_len, model_config.vocab_size)
        pages = size_pool(config, KVPool.page_bytes(*shape, self.dtype), max_seq_len, self.device, reserved)
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
        note = "; memory is committed as it is first used" if self.device.type == "cpu" else ""
        log.info("KV pool: %d pages of %d tokens (%d tokens, %.2f GiB%s)", pages, config.page_size, tokens, gib, note)
        self.sampler = Sampler(self.spec.max_running_requests, self.spec.vocab_size, self.device)
        self._inputs = InputBuilder(self.spec, self.device, detect_shared_prefix=needs.shared_prefix)
        # [request-pool rows, the scratch row included]: the token that the row sampled last.
        self._last_token_ids = torch.zeros(self.spec.max_running_requests + 1, dtype=torch.int64, device=self.device)
        self._device_lengths = needs.device_lengths
        # [request-pool rows, positions] int32: the tokens of each request, if steps may have several rounds.
        self._history: Tensor | None = None
        if config.verification_rounds > 1:
            rows = self.spec.max_running_requests + 1
            self._history = torch.zeros((rows, max_seq_len + 1), dtype=torch.int32, device=self.device)
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

    def _state_bytes(self, config: Config, max_seq_len: int, vocab_size: int) -> int:
        """Return the bytes of device memory for the page table, the tokens that later rounds need, and sampling.

        Only rank 0 samples.
        """
        rows = config.max_running_requests
        sampling = state_bytes(rows, vocab_size) if self.rank == 0 else 0
        history = 4 * (max_seq_len + 1) if config.verification_rounds > 1 else 0
        page_table = InputBuilder.page_table_row_bytes(max_seq_len, config.page_size)
        return (rows + 1) * (8 + page_table + history) + sampling

    def _capture(self, keys: Sequence[Any]) -> None:
        """Let the graph runner record every bucket, and log the progress."""
        if self.size == 1 and keys:  # a collective may wait for the other ranks while it is recorded
            cases = [Case(partial(self._make_buffers, k), self._forward_buffers, k.piecewise) for k in sorted(keys)]
            steps = steps_with_prompts(self.spec)
            cases += [Case(partial(self._make_inputs, step), self._forward_and_sample) for step in steps]
            compile_ahead(self.device, cases)
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
        return read_result(launched.step, launched.plan, dict(zip(launched.names, arrays, strict=True)))

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

    def _release_followers(self) -> None:
        """Send the other ranks the tokens of a step that will not be sampled, because they wait for them."""
        forward, self._unsampled = self._unsampled, None
        if self.size > 1 and forward is not None and forward.inputs is not None:
            with contextlib.suppress(EngineDeadError), self._computing():  # a rank that has exited needs no release
                self.comm.broadcast(torch.zeros_like(forward.inputs.req_pool_indices, dtype=torch.int64), src=0)

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
        if self.rank == 0:  # other ranks receive rank 0's sampled tokens and keep no sampling state
            self.sampler.admit(step.admissions)
        self._inputs.update_page_table(step)
        if self._history is not None:
            self._keep_tokens(step.admissions)
        forward = self._compute(step)
        if step.late_sampling and self.rank == 0:
            self._unsampled = forward
        else:
            self._sample(forward, None)

    def _keep_tokens(self, admissions: Sequence[Admission]) -> None:
        """Store the tokens of newly admitted requests, from which later rounds draft."""
        assert self._history is not None
        for admission in admissions:
            parts = [ids for ids in (admission.prompt_ids, admission.output_ids) if ids is not None]
            if parts:
                (ids,) = self._inputs.upload([np.concatenate(parts)])
                self._history[admission.req_pool_idx, : len(ids)] = ids

    def _sample(self, forward: _Forward, masks: TokenMasks | None) -> None:
        """Choose the tokens of a step on rank 0, give them to all ranks, and start the download of the result."""
        step, logits, inputs, tensors, key = forward
        if logits is None or inputs is None:
            self._download(step, None, tensors)
            return
        if step.rounds > 1 and key is not None and self._device_lengths:
            tensors["tokens"], tensors["accepted"] = self._replay_rounds(step, logits, inputs, key)
            self._download(step, inputs.plan, tensors)
            return
        sampled, accepted = self._choose(logits, inputs, masks)
        tensors["tokens"] = sampled.tokens
        if sampled.chosen is not None:
            tensors |= sampled._asdict()
        if accepted is not None:
            tensors["accepted"] = accepted.length
        if accepted is not None and step.rounds > 1:
            tensors["tokens"], tensors["accepted"] = self._repeat(step, sampled.tokens, accepted)
        self._download(step, inputs.plan, tensors)

    def _choose(
        self, logits: Tensor, inputs: SamplingInputs, masks: TokenMasks | None = None
    ) -> tuple[Sampled, Accepted | None]:
        """Sample, and compare the tokens with the drafts, if there are any. Only rank 0 has log-probabilities."""
        sampled = self._draw(logits, inputs, masks)
        rows, last_token_ids, accepted = inputs.req_pool_indices, sampled.tokens, None
        if inputs.verification is not None:
            accepted = inputs.verification.accept(sampled.tokens)
            rows, last_token_ids = inputs.verification.req_pool_indices, accepted.last
        self._last_token_ids.index_put_((rows,), last_token_ids)  # no index occurs twice
        if self._history is not None:
            self._history[inputs.req_pool_indices.long(), inputs.positions.long()] = sampled.tokens.int()
        if self.rank == 0:
            self.sampler.commit(sampled.tokens, inputs, accepted)
        return sampled, accepted

    def _draw(self, logits: Tensor, inputs: SamplingInputs, masks: TokenMasks | None = None) -> Sampled:
        """Sample on rank 0, and give the tokens to all ranks."""
        if self.rank == 0:
            sampled = self.sampler.sample(logits, inputs, masks)
        else:
            sampled = Sampled(torch.empty(len(inputs.req_pool_indices), dtype=torch.int64, device=self.device))
        return sampled if self.size == 1 else sampled._replace(tokens=self.comm.broadcast(sampled.tokens, src=0))

    def _replay_rounds(self, step: Step, logits: Tensor, inputs: SamplingInputs, key: Any) -> tuple[Tensor, Tensor]:
        """Compute all rounds of a step with replays of one graph, whose inputs the device changes between them.

        ``logits`` and ``inputs`` are those of the first round. Returns what `_repeat` returns.
        """
        assert self._history is not None and inputs.verification is not None
        width, packed = int(step.num_scheduled_tokens[0]), self._buffers[key].tokens.packed
        verification = inputs.verification._replace(drafts=inputs.verification.drafts.clone())
        inputs = inputs._replace(verification=verification)
        table, size = self._inputs.page_table, self.spec.page_size
        all_tokens: list[Tensor] = []
        lengths: list[Tensor] = []
        for number in range(step.rounds):
            if number:
                verification.drafts[:, :-1] = packed[0, : len(logits)].view(-1, width)[:, 1:]
                inputs = inputs._replace(positions=packed[4, : len(logits)].clone())
                logits = self.graph.run(key)[: len(logits)]
            tokens = self._draw(logits, inputs).tokens
            length = advance(tokens.view(-1, width), packed, self._history, table, size)
            if self.rank == 0 and inputs.plan.flags & PENALTY:
                last = packed[0, : len(logits) : width].long()
                self.sampler.commit(tokens, inputs, Accepted(length.long(), last))
            all_tokens.append(tokens)
            lengths.append(length)
        self._last_token_ids.index_put_((verification.req_pool_indices,), packed[0, : len(logits) : width].long())
        return torch.stack(all_tokens), torch.stack(lengths)

    def _repeat(self, step: Step, tokens: Tensor, accepted: Accepted) -> tuple[Tensor, Tensor]:
        """Compute the rounds of a step after the first, whose sampled ``tokens`` and ``accepted`` are given.

        Returns the sampled tokens of all rounds int64 [rounds, rows · w], and how many of each w count [rounds, rows].
        """
        assert self._history is not None
        starts, width = step.num_computed_tokens, int(step.num_scheduled_tokens[0])
        rows, nothing = torch.from_numpy(step.req_pool_indices), np.empty(0, np.int32)
        all_tokens, lengths = [tokens], [accepted.length]
        for _ in range(1, step.rounds):
            starts = starts + lengths[-1].cpu().numpy().astype(np.int32)
            drafts = next_drafts(self._history, rows, torch.from_numpy(starts + 1), width - 1)
            ids = np.concatenate((np.full((step.rows, 1), PENDING, np.int32), drafts.cpu().numpy()), axis=1)
            again = replace(
                step,
                num_computed_tokens=starts,
                input_ids=ids.reshape(-1),
                page_table_updates=(nothing, nothing, nothing),
                admissions=(),
                rounds=1,
            )
            forward = self._compute(again)
            assert forward.logits is not None and forward.inputs is not None
            sampled, accepted_again = self._choose(forward.logits, forward.inputs)
            assert accepted_again is not None
            all_tokens.append(sampled.tokens)
            lengths.append(accepted_again.length)
        return torch.stack(all_tokens), torch.stack(lengths)

    def _download(self, step: Step, plan: SamplePlan | None, tensors: dict[str, Tensor]) -> None:
        download = Download(list(tensors.values()), self._stream)
        self._in_flight.append(_LaunchedStep(step, plan, list(tensors), download))

    def _compute(self, step: Step) -> _Forward:
        """Run the forward pass with the fewest launches: graph replay, replay in pieces, or operation by operation."""
        key = self._pick(step)
        return self._forward(step) if key is None else self._replay(step, key)

    def _pick(self, step: Step) -> Any | None:
        """Return the bucket of decode rows with which the step can be replayed as one launch, or None.

        A verification row can be computed as several decode rows of one request: its tokens are stored in the pool
        before attention reads them. Kernels for a few rows store and read in one launch, so they must not be used.
        """
        if step.num_verify and self._inputs.repeats_few_reads(step):
            return self.graph.pick(max(len(step.input_ids), MAX_PROJECTED_ROWS + 1), 1, True)
        return self.graph.pick(step.rows, 1, step.num_decode == step.rows)

    def _plan_sampling(self, step: Step) -> SamplePlan | None:
        """Return the plan of sampling for all sampled positions of the step. None: no row samples."""
        if step.num_decode == step.rows:
            return self.sampler.plan(step.req_pool_indices)
        req_pool_indices = np.repeat(step.req_pool_indices, step.num_sampled_tokens)
        return self.sampler.plan(req_pool_indices) if len(req_pool_indices) else None

    def _forward(self, step: Step) -> _Forward:
        """Run the step in pieces, if there is a bucket for it, or else operation by operation."""
        plan = self._plan_sampling(step)
        tokens, batch = self._make_inputs(step)
        inputs = None if plan is None else self._inputs.sampling_inputs(step, plan, batch)
        prompt = self._inputs.prompt_positions(step) if step.prompt_logprobs else None
        indices: Tensor | None
        if inputs is None:  # if no hidden state is needed, pass token 0 as a dummy: the model needs an index
            num_sampled, indices = 0, batch.cu_seqlens_q[:1] if prompt is None else prompt.indices
        else:
            num_sampled, indices = len(inputs.req_pool_indices), inputs.logits_indices
            if prompt is not None and indices is not None:
                indices = torch.cat((indices, prompt.indices))
        hidden = self._hidden(tokens, batch, indices)
        logits = None if inputs is None else self.model.logits(hidden[:num_sampled])
        scores: dict[str, Tensor] = {}
        if prompt is not None:
            scores = score_prompt(hidden[num_sampled:], prompt, self.model.logits, self.spec.vocab_size)
        return _Forward(step, logits, inputs, scores)

    def _hidden(self, tokens: ModelInputs, batch: AttnBatch, indices: Tensor | None) -> Tensor:
        """Return the hidden states of the tokens in ``indices`` int32; None: of all tokens.

        The step is replayed in pieces if there is a bucket for its tokens, and room in it for ``indices``.
        """
        num_tokens = tokens.packed.shape[1]
        num_needed = num_tokens if indices is None else len(indices)
        if self._piecewise is not None and num_needed <= PiecewiseInputBuffers.capacity(self.spec):
            key = self.graph.pick_tokens(num_tokens)
            if key is not None:  # with None, each row has one token: list them, to leave out the padding
                return self._replay_pieces(key, tokens, batch.cu_seqlens_q[1:] - 1 if indices is None else indices)
        return self.model.forward(*self._resolve(tokens), indices)

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
        the tokens in ``buffers.logits_indices``, or of all tokens if this attribute is None.
        """
        if not isinstance(buffers, PiecewiseInputBuffers):
            return self.model.logits(self.model.forward(*self._resolve(buffers.tokens)))
        assert self._piecewise is not None
        with self._piecewise.in_bucket(0):
            return self.model.forward(*self._resolve(buffers.tokens), buffers.logits_indices)

    def _make_inputs(self, step: Step) -> tuple[ModelInputs, AttnBatch]:
        """Build the inputs of a step that is not replayed as one graph, and plan its attention."""
        tokens, batch = self._inputs.build(step)
        self.attention.plan(batch)
        return tokens, batch

    def _forward_and_sample(self, inputs: tuple[ModelInputs, AttnBatch]) -> Tensor:
        """Run the forward pass of a step that no bucket holds, and each kernel that chooses a token of a row."""
        tokens, batch = inputs
        hidden = self.model.forward(*self._resolve(tokens), batch.cu_seqlens_q[1:] - 1)
        return self.sampler.launch_all(self.model.logits(hidden))

    def _replay(self, step: Step, key: Any) -> _Forward:
        """Pad a step up to its bucket of decode rows and replay the bucket's graph: each token of the step is a row.

        The next replay overwrites the logits, so the step must be sampled before.
        """
        if not step.num_verify and self._inputs.find_shared_prefix(step):
            key = min((k for k in self._buffers if k.shared_prefix and k.rows >= step.rows), default=key)
        batch = self._buffers[key].fill(self._inputs.token_rows(step))
        self._plan(batch, key)
        logits = self.graph.run(key)
        plan = self._plan_sampling(step)  # while the device computes
        inputs = None if plan is None else self._inputs.sampling_inputs(step, plan, batch)
        return _Forward(step, logits[: len(step.input_ids)], inputs, {}, key)

    def _replay_pieces(self, key: Any, tokens: ModelInputs, indices: Tensor) -> Tensor:
        """Replay the pieces recorded for bucket ``key`` on the step's tokens; attention between them runs eagerly.

        Returns the hidden states of the tokens in ``indices`` int32.
        """
        buffers = self._piecewise_buffers[key]
        buffers.fill(tokens, indices)
        assert self._piecewise is not None
        with self._piecewise.in_bucket(tokens.packed.shape[1]):
            hidden: Tensor = self.graph.run(key)
        return hidden[: len(indices)] if buffers.logits_indices is not None else hidden.index_select(0, indices)
