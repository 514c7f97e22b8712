"""The plain run of a `Step` on one rank: prepare its inputs, run the model, sample. SGLang and vLLM: `ModelRunner`.

A step is computed operation by operation. A part of the group `graph` may wrap this runner, to launch the same
operations with less host time; it calls the methods `prepare`, `hidden` and `logits` that `forward` consists of. The
runner knows steps and tensors. Streams, steps in flight and results belong to `minisgl.engine.engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.attention import AttentionBackend, AttnBatch
from minisgl.core import I32, EngineSpec, Step, StepResult, TokenMasks
from minisgl.engine.inputs import InputBuilder, Line, ModelInputs, SamplePlan, SamplingInputs
from minisgl.engine.sampler import Sampler
from minisgl.layers.context import Context
from minisgl.models.decoder import Model

__all__ = ["Forward", "ModelRunner", "Prepared", "StepRunner"]


class Prepared(NamedTuple):
    """The inputs of a step on the device. Attention has been planned for them."""

    step: Step
    tokens: ModelInputs
    sampling: SamplingInputs | None  # None: no row samples
    scored: Tensor | None  # int32: tokens whose hidden states `ModelRunner.scorer` reads. None: the step scores none
    batch: AttnBatch
    indices: Tensor | None  # int32: tokens whose hidden states are needed: first those to sample after. None: all

    @property
    def num_sampled(self) -> int:
        """Number of positions after which the step samples."""
        return 0 if self.sampling is None else len(self.sampling.req_pool_indices)


class Forward(NamedTuple):
    """A step whose forward pass was launched, before it samples.

    ``logits`` [sampled positions, vocab] and ``sampling`` are None if no row samples. ``scores`` are those of prompts,
    as tensors by name for one of `ModelRunner.readers`; empty if the step scores none.
    """

    step: Step
    logits: Tensor | None
    sampling: SamplingInputs | None
    scores: dict[str, Tensor]
    repeat: Any | None = None  # from a wrapper that can launch the pass again: its inputs, and a method ``run``


Reader = Callable[[Step, StepResult, Mapping[str, npt.NDArray[Any]]], StepResult]
"""Returns the result of a step with what it makes of the tensors of `StepRunner.sample`, given on the host, by name."""


class StepRunner(Protocol):
    """A runner of steps, as the engine calls it: `ModelRunner`, or an object that wraps one."""

    def start(self) -> None:
        """Make the attention backend ready, and whatever else the first step needs. Called once, on the stream."""

    def begin(self, step: Step) -> None:
        """Apply the admissions and page-table updates of a step. Called before its `forward`."""

    def forward(self, step: Step) -> Forward:
        """Launch the forward pass of a step. The logits are valid until the next call."""

    def sample(self, forward: Forward, masks: TokenMasks | None) -> dict[str, Tensor]:
        """Choose the tokens of a step, under ``masks``, on rank 0, and give them to all ranks.

        Returns the tensors of which `read` makes the result, by name.
        """

    def read(self, step: Step, arrays: Mapping[str, npt.NDArray[Any]]) -> StepResult:
        """Return the result of a step. ``arrays`` are the tensors that `sample` returned, on the host."""

    def close(self) -> None:
        """Release what the runner holds. The engine calls it before it closes the communicator."""


class ModelRunner:
    """Runs steps operation by operation. ``max_step_tokens`` is the largest number of tokens of a step with prompts.

    ``rank`` 0 of ``size`` ranks samples, and sends the tokens to the others.
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        ctx: Context,
        spec: EngineSpec,
        *,
        max_step_tokens: int,
        rank: int = 0,
        size: int = 1,
    ):
        self.model, self.attention, self.ctx, self.spec = model, attention, ctx, spec
        self.max_step_tokens, self.rank, self.size, self.device = max_step_tokens, rank, size, ctx.device
        self.sampler = Sampler(spec.max_running_requests, spec.vocab_size, self.device)
        self.inputs = InputBuilder(spec, self.device)
        self.scorer: Any = None  # scores prompts: plugins/sampling/prompt_logprobs.py; None without this plugin
        # By the name of a tensor of `sample`: what adds it to the result of a step that has such a tensor.
        self.readers: dict[str, Reader] = {}
        # [request-pool rows, the scratch row included]: the token that the row sampled last.
        self.last_token_ids = torch.zeros(spec.max_running_requests + 1, dtype=torch.int64, device=self.device)

    def start(self) -> None:
        """Bind the attention backend to the KV pool and the layers. It may launch kernels."""
        assert self.ctx.pool is not None
        self.attention.bind(self.ctx.pool, self.model.attention_layers(), ())

    def close(self) -> None:
        """Drop model, attention backend, and the tensors of inputs and sampling."""
        vars(self).clear()

    # ---- a step ---------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Apply the admissions and page-table updates of a step."""
        if self.rank == 0:  # other ranks receive rank 0's sampled tokens and keep no sampling state
            self.sampler.admit(step.admissions)
        self.inputs.update_page_table(step)
        if step.state_loads is not None:
            slots, rows = (indices.long() for indices in self.inputs.upload(step.state_loads))
            for state in self.ctx.states:
                state[rows] = state[slots]

    def forward(self, step: Step) -> Forward:
        """Launch the forward pass of a step: prepare its inputs, run the model, compute logits."""
        prepared = self.prepare(step)
        return self.logits(prepared, self.hidden(prepared))

    def prepare(self, step: Step) -> Prepared:
        """Build the inputs of the model and of sampling, and plan attention."""
        plan = self.plan_sampling(step)
        tokens, batch = self.inputs.build(step)
        self.attention.plan(batch)
        self.ctx.batch, self.ctx.state_saves = batch, step.state_saves
        sampling = None if plan is None else self.inputs.sampling_inputs(step, plan, batch)
        scored = self.scorer.indices(step) if step.prompt_logprobs and self.scorer is not None else None
        indices: Tensor | None
        if sampling is None:  # if no hidden state is needed, pass token 0 as a dummy: the model needs an index
            indices = batch.cu_seqlens_q[:1] if scored is None else scored
        else:
            indices = sampling.logits_indices
            if scored is not None and indices is not None:
                indices = torch.cat((indices, scored))
        return Prepared(step, tokens, sampling, scored, batch, indices)

    def hidden(self, prepared: Prepared) -> Tensor:
        """Run the model. Return the hidden states [tokens, hidden] of the tokens in ``prepared.indices``."""
        return self.model.forward(*self.resolve(prepared.tokens), prepared.indices)

    def logits(self, prepared: Prepared, hidden: Tensor) -> Forward:
        """Compute the logits of the positions that sample, and the scores of prompt tokens."""
        num_sampled, scores = prepared.num_sampled, {}
        logits = None if prepared.sampling is None else self.model.logits(hidden[:num_sampled])
        if prepared.scored is not None and self.scorer is not None:
            scores = self.scorer.score(prepared.step, hidden[num_sampled:])
        return Forward(prepared.step, logits, prepared.sampling, scores)

    def sample(self, forward: Forward, masks: TokenMasks | None) -> dict[str, Tensor]:
        """Choose the tokens of a step, and compare them with its drafts, if it has some.

        Returns, by name, what `read_tokens` reads, the scores of prompts, and on rank 0 what processors add.
        """
        inputs = forward.sampling
        if forward.logits is None or inputs is None:
            return forward.scores
        tokens = self.draw(forward.logits, inputs, masks)
        tensors = {**forward.scores, "tokens": tokens}
        rows, last_token_ids, accepted = inputs.req_pool_indices, tokens, None
        if inputs.verification is not None:
            accepted = inputs.verification.accept(tokens)
            rows, last_token_ids = inputs.verification.req_pool_indices, accepted.last
            tensors["accepted"] = accepted.length
        self.last_token_ids.index_put_((rows,), last_token_ids)  # no index occurs twice
        if self.rank == 0:
            tensors |= self.sampler.commit(tokens, inputs, accepted)
        return tensors

    def read(self, step: Step, arrays: Mapping[str, npt.NDArray[Any]]) -> StepResult:
        """Return the result of a step. ``arrays`` are the tensors that `sample` returned, on the host."""
        result = StepResult(step.id, *read_tokens(step, arrays))
        for name, read in self.readers.items():
            if name in arrays:
                result = read(step, result, arrays)
        return result

    # ---- its parts ------------------------------------------------------------------------------

    def plan_sampling(self, step: Step) -> SamplePlan | None:
        """Return the plan of sampling for all sampled positions of the step. None: no row samples."""
        if step.num_decode == step.rows:
            return self.sampler.plan(step.req_pool_indices)
        req_pool_indices = np.repeat(step.req_pool_indices, step.num_sampled_tokens)
        return self.sampler.plan(req_pool_indices) if len(req_pool_indices) else None

    def resolve(self, tokens: ModelInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return token ids, positions and out_cache_loc (KV locations to write), int64 [tokens] each.

        A PENDING id is replaced by the token that its request-pool row sampled last.
        """
        input_ids, positions, out_cache_loc, req_pool_indices = tokens.packed[: Line.SEQ_LEN].long().unbind()
        if tokens.pending:
            input_ids = torch.where(input_ids < 0, self.last_token_ids.index_select(0, req_pool_indices), input_ids)
        return input_ids, positions, out_cache_loc

    def draw(self, logits: Tensor, inputs: SamplingInputs, masks: TokenMasks | None = None) -> Tensor:
        """Sample on rank 0, and give the tokens, int64 [sampled positions], to all ranks."""
        if self.rank == 0:
            tokens = self.sampler.sample(logits, inputs, masks)
        else:
            tokens = torch.empty(len(inputs.req_pool_indices), dtype=torch.int64, device=self.device)
        return tokens if self.size == 1 else self.ctx.comm.broadcast(tokens, src=0)


def read_tokens(step: Step, arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[I32, I32]:
    """Return ``tokens`` and ``accepted`` of a `StepResult`. Tokens that do not count are 0.

    ``arrays``, by name: ``tokens`` int64 [sampled positions], missing if no row samples, and ``accepted`` int64 with an
    entry for each row that samples, only if a row verifies.
    """
    counts = step.num_sampled_tokens
    if "accepted" not in arrays:
        sampled = arrays.get("tokens")
        if sampled is not None and len(sampled) == step.rows:
            return sampled.astype(np.int32)[:, None], counts.copy()
        tokens = np.zeros((step.rows, 1), np.int32)
        if sampled is not None:
            tokens[step.sample, 0] = sampled
        return tokens, counts.copy()
    accepted = np.zeros(step.rows, np.int32)
    accepted[step.sample] = arrays["accepted"]
    tokens = np.zeros((step.rows, counts.max()), np.int32)
    k = np.arange(tokens.shape[1])
    tokens[k < counts[:, None]] = arrays["tokens"]
    tokens[k >= accepted[:, None]] = 0
    return tokens, accepted
