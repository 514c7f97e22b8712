"""The runner of steps that replays recorded launches: it wraps a `ModelRunner`, and asks a `BucketRunner` what to do.

A step is computed with the fewest launches: as one replay, if a bucket of decode rows holds it; in pieces, if a bucket
of tokens holds it; or else operation by operation, by the wrapped runner.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minisgl.attention import AttnBatch, GraphKey
from minisgl.core import Step
from minisgl.engine.model_runner import Forward, ModelRunner, Prepared
from minisgl.engine.sampler import Sampler
from minisgl.plugins.graph.replaying.buckets import BucketRunner, StaticInputs
from minisgl.plugins.graph.replaying.compile_ahead import Case, compile_ahead
from minisgl.plugins.graph.replaying.inputs import GraphInputBuffers, PiecewiseInputBuffers, repeats_few_reads
from minisgl.plugins.graph.replaying.piecewise import PiecewiseAttention
from minisgl.plugins.graph.replaying.warmup import steps_with_prompts

__all__ = ["ReplayingRunner"]

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 2.0
"""Shortest time in seconds between two progress messages in the log while graphs are recorded."""


class _Repeat(NamedTuple):
    """The recording of a step, which can be replayed again: see `minisgl.engine.model_runner.Forward`."""

    graph: BucketRunner
    key: GraphKey
    packed: Tensor

    def run(self) -> Tensor:
        return self.graph.run(self.key)


class ReplayingRunner:
    """Runs a step by a replay of a recording of ``graph``, if one fits, or else by ``runner``.

    A runner with the method ``piecewise`` has recordings for steps with prompts too. While these are replayed,
    attention is computed between the pieces, so the model calls it through a `PiecewiseAttention`.
    """

    def __init__(self, runner: ModelRunner, graph: BucketRunner):
        self.runner, self.graph = runner, graph
        self.begin, self.sample, self.read = runner.begin, runner.sample, runner.read
        needs, piecewise = runner.attention.needs(), getattr(graph, "piecewise", None)
        self._repeats, self._fused_rows = needs.device_lengths, needs.fused_rows
        self._has_states = runner.spec.has_states
        if self._has_states:  # a state absorbs the tokens of each row on its own, which no bucket of tokens records
            piecewise = None
        self.piecewise_keys: Sequence[GraphKey] = piecewise(runner.max_step_tokens) if piecewise is not None else ()
        keys = graph.buckets(runner.spec.max_running_requests) if needs.graph else ()
        if needs.shared_prefix:  # only for multiples of 32 rows: padding costs less than more recordings
            keys = [*keys, *(key._replace(shared_prefix=True) for key in keys if key.rows % 32 == 0)]
        self.decode_keys: Sequence[GraphKey] = keys
        self.buffers: dict[GraphKey, StaticInputs] = {}
        self._piecewise_buffers: dict[GraphKey, PiecewiseInputBuffers] = {}
        self._old: set[GraphKey] = set()  # buckets whose recordings have kernels that the model no longer launches
        attention = runner.ctx.attention
        self._piecewise = attention if isinstance(attention, PiecewiseAttention) else None

    # ---- a step ---------------------------------------------------------------------------------

    def forward(self, step: Step) -> Forward:
        """Launch the forward pass of a step with the fewest launches."""
        key = self.pick(step)
        if key is not None:
            return self._replay(step, key)
        prepared = self.runner.prepare(step)
        key = self._pick_pieces(prepared)
        hidden = self.runner.hidden(prepared) if key is None else self._replay_pieces(key, prepared)
        return self.runner.logits(prepared, hidden)

    def pick(self, step: Step) -> GraphKey | None:
        """Return the bucket of decode rows with which the step can be replayed as one launch, or None.

        A verification row can be computed as several decode rows of one request: its tokens are stored in the pool
        before attention reads them. An attention backend that stores and reads a few rows in one launch can't compute
        them, so such a step gets a bucket of more rows: see `AttnNeeds.fused_rows`.
        """
        if step.num_verify and repeats_few_reads(step):
            return self.graph.pick(max(len(step.input_ids), self._fused_rows + 1), 1, True)
        return self.graph.pick(step.rows, 1, step.num_decode == step.rows)

    def _replay(self, step: Step, key: GraphKey) -> Forward:
        """Pad a step up to its bucket of decode rows and replay the bucket's graph: each token of the step is a row.

        The next replay overwrites the logits, so the step must be sampled before.
        """
        inputs = self.runner.inputs
        find_shared_prefix = getattr(inputs, "find_shared_prefix", None)  # see `with_shared_prefix`
        if find_shared_prefix is not None and not step.num_verify and find_shared_prefix(step):
            key = min((k for k in self.buffers if k.shared_prefix and k.rows >= step.rows), default=key)
        self._record_if_old(key)
        buffers = self.buffers[key]
        batch = buffers.fill(inputs.token_rows(step))
        self._plan(batch, key)
        logits = self.graph.run(key)
        plan = self.runner.plan_sampling(step)  # while the device computes
        sampling = None if plan is None else inputs.sampling_inputs(step, plan, batch)
        repeat = _Repeat(self.graph, key, buffers.tokens.packed) if self._repeats else None
        return Forward(step, logits[: len(step.input_ids)], sampling, {}, repeat)

    def _pick_pieces(self, prepared: Prepared) -> GraphKey | None:
        """Return the bucket of tokens with room for the step, and for the hidden states that it needs, or None."""
        num_tokens = prepared.tokens.packed.shape[1]
        num_needed = num_tokens if prepared.indices is None else len(prepared.indices)
        if self._piecewise is None or num_needed > PiecewiseInputBuffers.capacity(self.runner.spec):
            return None
        key: GraphKey | None = self.graph.pick_tokens(num_tokens)  # type: ignore[attr-defined]
        return key

    def _replay_pieces(self, key: GraphKey, prepared: Prepared) -> Tensor:
        """Replay the pieces of bucket ``key`` on the step's tokens; attention between them runs eagerly.

        Returns the hidden states that the step needs.
        """
        assert self._piecewise is not None
        self._record_if_old(key)
        indices, buffers = prepared.indices, self._piecewise_buffers[key]
        if indices is None:  # each row has one token: list them, to leave out the padding
            indices = prepared.batch.cu_seqlens_q[1:] - 1
        buffers.fill(prepared.tokens, indices)
        with self._piecewise.in_bucket(prepared.tokens.packed.shape[1]):
            hidden = self.graph.run(key)
        return hidden[: len(indices)] if buffers.logits_indices is not None else hidden.index_select(0, indices)

    def _plan(self, batch: AttnBatch, key: GraphKey) -> None:
        """Plan attention for a bucket. A shared-prefix bucket gets the prefix length as a static device buffer."""
        if key.shared_prefix:
            batch = replace(batch, shared_prefix_len=getattr(self.runner.inputs, "shared_prefix_len", None))
        self.runner.attention.plan(batch)
        self.runner.ctx.batch, self.runner.ctx.state_saves = batch, None  # layers with a state read the static buffers

    def forget(self) -> None:
        """Record each bucket again before its next replay, because the model launches other kernels from now on."""
        self._old = {*self.decode_keys, *self.piecewise_keys}

    def _record_if_old(self, key: GraphKey) -> None:
        if key in self._old:
            self._old.discard(key)
            self.graph.capture([key], self._make_buffers, self._forward_buffers)

    # ---- before the first step ------------------------------------------------------------------

    def start(self) -> None:
        """Bind the attention backend, and let the graph runner record every bucket. Kernels are compiled before."""
        runner, keys = self.runner, [*self.decode_keys, *self.piecewise_keys]
        assert runner.ctx.pool is not None
        runner.attention.bind(runner.ctx.pool, runner.model.attention_layers(), self.decode_keys)
        if runner.size == 1 and keys:  # a collective may wait for the other ranks while it is recorded
            cases = [Case(partial(self._make_buffers, k), self._forward_buffers, k.piecewise) for k in sorted(keys)]
            steps = [] if self._has_states else steps_with_prompts(runner.spec)
            cases += [Case(partial(runner.prepare, step), self._forward_and_sample) for step in steps]
            compile_ahead(runner.device, cases)
        self._capture(keys)

    def _capture(self, keys: Sequence[GraphKey]) -> None:
        """Let the graph runner record every bucket, and log the progress."""
        started = last_logged = time.monotonic()
        begun = 0

        def make_buffers(key: GraphKey) -> StaticInputs | PiecewiseInputBuffers:
            nonlocal begun, last_logged
            if time.monotonic() - last_logged > PROGRESS_SECONDS:
                last_logged = time.monotonic()
                log.info("recorded %d of %d graphs", begun, len(keys))
            begun += 1
            return self._make_buffers(key)

        self.graph.capture(keys, make_buffers, self._forward_buffers)
        if keys:
            log.info("recorded %d graphs in %.1f s", len(keys), time.monotonic() - started)

    def _make_buffers(self, key: GraphKey) -> StaticInputs | PiecewiseInputBuffers:
        """Allocate the static input buffers of a bucket, filled with padding.

        For a decode bucket also plan attention over the padding rows, because attention is part of the recording.
        """
        spec, device = self.runner.spec, self.runner.device
        if key.piecewise:
            self._piecewise_buffers[key] = PiecewiseInputBuffers(key, spec, device)
            return self._piecewise_buffers[key]
        factory: Any = getattr(self.graph, "input_buffers", GraphInputBuffers)
        buffers: StaticInputs = factory(key, spec, self.runner.inputs.page_table, device)
        self.buffers[key] = buffers
        self._plan(buffers.fill(None), key)
        return buffers

    def _forward_buffers(self, buffers: StaticInputs | PiecewiseInputBuffers) -> Tensor:
        """Run the forward pass that a graph records, on static buffers only.

        Returns logits [bucket rows, vocab] for a decode bucket. For a piecewise bucket, returns the hidden states of
        the tokens in ``buffers.logits_indices``, or of all tokens if this attribute is None.
        """
        model, inputs = self.runner.model, self.runner.resolve(buffers.tokens)
        if not isinstance(buffers, PiecewiseInputBuffers):
            return model.logits(model.forward(*inputs))
        assert self._piecewise is not None
        with self._piecewise.in_bucket(0):
            return model.forward(*inputs, buffers.logits_indices)

    def _forward_and_sample(self, prepared: Prepared) -> Tensor:
        """Run the forward pass of a step that no bucket holds, and each kernel that chooses a token of a row."""
        runner, indices = self.runner, prepared.batch.cu_seqlens_q[1:] - 1
        hidden = runner.model.forward(*runner.resolve(prepared.tokens), indices)
        return _launch_sampling(runner.sampler, runner.model.logits(hidden))

    def close(self) -> None:
        """Drop the recordings and their buffers."""
        self.graph.close()
        self.buffers.clear()
        self._piecewise_buffers.clear()
        self._piecewise = None
        self.runner.close()


def _launch_sampling(sampler: Sampler, logits: Tensor) -> Tensor:
    """Launch each kernel that chooses tokens, once with ``logits`` [rows, vocab] and once with them as float32.

    The tokens that it returns have no meaning. It is called to record the launches.
    """
    rows = torch.zeros(len(logits), dtype=torch.int32, device=sampler.device)
    hashes = torch.zeros(sampler.vocab_size, dtype=torch.int32, device=sampler.device)
    bits = torch.zeros(1, -(-sampler.vocab_size // 32), dtype=torch.int32, device=sampler.device)
    for x in (logits, logits.float()):
        sampler.mask_tokens(x, rows[:1], bits)
        sampler.draw(x, sampler.params, rows, rows, hashes)
        tokens = sampler.argmax(x)
    sampler.draw(x, sampler.params, rows, rows, hashes, scaled=False)
    return tokens
