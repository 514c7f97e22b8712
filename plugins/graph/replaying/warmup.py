"""Steps that an engine computes before its first request, so that no request waits for a compiler or a library.

A kernel is compiled, or loaded from a cache on disk, when it is first launched with arguments of a new kind. The graphs
launch most kernels when they are recorded; sampling, the attention of prompts and steps without a bucket remain. So the
engine computes the steps of `warm_up_steps`: prompts of different lengths, decode rows with each part of sampling, and
steps that mix them. They read and write the scratch page only, and leave nothing behind that a request can see.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from minisgl.core import I32, PENDING, Admission, EngineSpec, PromptRange, SamplingParams, Step, TokenMasks

if TYPE_CHECKING:
    import torch

    from minisgl.config import Config
    from minisgl.engine.engine import TorchEngine

__all__ = ["KINDS", "steps_with_prompts", "warm_up", "warm_up_steps"]

log = logging.getLogger(__name__)

WARMED_DEVICES = ("cuda",)
"""Types of devices on which an engine computes steps before it is ready. A CPU's kernels are compiled when it is built.
"""

KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=0.7, top_k=20, min_p=0.1),
    SamplingParams(temperature=0.7, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1),
    SamplingParams(temperature=0.0, logit_bias={0: 1.0}, logprobs=SamplingParams.MAX_LOGPROBS),
)
"""Sampling parameters that together use every part of sampling, and each kernel that draws a token: of logits in the
model's dtype or in float32, with noise or without."""

PROMPTS = (5, 40, 200, 1100, 1500, 3000, 6000)
"""Lengths in tokens of prompts that a step computes alone. Kernels and their tiles depend on the number of tokens."""

MANY_TOKENS = 1280
"""Tokens of a step with prompts of many rows: more than there are in the largest bucket but that of full chunks."""

ROWS = (2, 3, 4, 8, 16, 33, 64, 128, 256)
"""Numbers of rows whose prompts a step ends. cuBLASLt has other kernels for odd numbers than for even ones."""

DECODE_ROWS = (1, 3, 64)
"""Numbers of decode rows that sample. Some libraries choose another kernel for a few rows than for many."""

MIXED_ROWS = (1, 2, 4)
"""Numbers of decode rows of steps that also have a prompt. Such steps compute few decode rows by other kernels than
steps of decode rows alone (`minisgl.plugins.kernels.converted.few_rows`)."""

VERIFY_ROWS = (1, 4, 64)
"""Numbers of rows that verify drafts."""
DRAFTS = (1, 4)
"""Numbers of drafts of each of these rows."""


class _Row(NamedTuple):
    """One row of a step. It computes ``tokens`` tokens from position ``start`` on, and samples after the last one.

    A row with ``drafts`` samples after its first token and after each draft.
    """

    start: int
    tokens: int
    params: SamplingParams | None = None  # of a request that the step admits to this row
    drafts: int = 0


def warm_up_steps(
    spec: EngineSpec, device: torch.device, max_tokens: int, *, drafting: bool, rounds: int
) -> Iterable[Step]:
    """Return steps of all kinds, each of at most ``max_tokens`` tokens of prompts; none where it is not needed.

    With ``drafting``, also steps that verify drafts: in up to ``rounds`` rounds. All ranks get the same steps. Their
    ids do not count: the first step of a scheduler has the id 0 as well.
    """
    if device.type not in WARMED_DEVICES:
        return ()
    return _Steps(spec).all(max_tokens, drafting=drafting, rounds=rounds)


def warm_up(engine: TorchEngine, config: Config, *, drafting: bool) -> None:
    """Compute the steps of `warm_up_steps` on one rank, and wait for their results.

    No step may be in flight. With several ranks, each rank must call this, before rank 0 has ``peers``: all compute the
    same steps.
    """
    rounds, spec = config.verification_rounds, engine.spec
    started, count = time.monotonic(), 0
    for step in warm_up_steps(spec, engine.device, config.max_prefill_tokens, drafting=drafting, rounds=rounds):
        engine.launch(step)
        if step.late_sampling and engine.rank == 0:
            bits = np.full((1, -(-spec.vocab_size // 32)), -1, np.int32)
            engine.sample(TokenMasks(np.zeros(1, np.int32), bits))
        engine.result()
        count += 1
    if count:
        log.info("computed %d steps to warm up in %.1f s", count, time.monotonic() - started)


def steps_with_prompts(spec: EngineSpec) -> list[Step]:
    """Return steps with one short prompt, alone and after each of `MIXED_ROWS` numbers of decode rows."""
    steps = _Steps(spec)
    return [
        steps.with_prompt(rows, spec.max_seq_len - 2) for rows in (0, *MIXED_ROWS) if rows < spec.max_running_requests
    ]


class _Steps:
    """Writes the steps of a warm-up. Row r of a step is request-pool row r; all pages are the scratch page."""

    def __init__(self, spec: EngineSpec):
        self.spec = spec
        self.next_id = 0

    def all(self, max_tokens: int, *, drafting: bool = False, rounds: int = 1) -> Iterator[Step]:
        """Yield all steps that fit the engine, each of at most ``max_tokens`` tokens of prompts.

        With ``drafting``, also steps that verify drafts: in up to ``rounds`` rounds.
        """
        spec = self.spec
        longest = min(spec.max_seq_len - 2, max_tokens)
        most = min(spec.max_running_requests, max(max_tokens // 2, 1))
        for length in sorted({min(length, longest) for length in (*PROMPTS, max_tokens)}):
            yield self.step([], [_Row(0, length, KINDS[0])])
        for rows in sorted({min(rows, most) for rows in ROWS}):
            for length in (2, -(-MANY_TOKENS // rows)):
                if rows * length <= max_tokens and length <= longest:
                    yield self.step([], [_Row(0, length, KINDS[0])] * rows)
        yield self.step([], [_Row(0, min(8, longest), KINDS[0])], scored=3)
        for rows in sorted({min(rows, most) for rows in DECODE_ROWS}):
            for kind in KINDS:
                yield self.step([_Row(1, 1, kind)] * rows, [])
            yield self.step([_Row(1, 1, KINDS[i % len(KINDS)]) for i in range(rows)], [])
        for rows in MIXED_ROWS:
            if rows < most:
                yield self.with_prompt(rows, longest)
        yield self.step([_Row(1, 1, KINDS[0])], [], masked=True)
        if drafting:
            yield from self._verifying(most, longest, rounds)

    def with_prompt(self, rows: int, longest: int) -> Step:
        """Return a step of decode rows and one short prompt of at most ``longest`` tokens."""
        return self.step([_Row(1, 1, KINDS[0])] * rows, [_Row(0, min(40, longest), KINDS[1])])

    def _verifying(self, most: int, longest: int, rounds: int) -> Iterator[Step]:
        """Yield steps that verify drafts: after a short prefix, as one launch, and after a long one, in pieces.

        With ``rounds`` above 1, also steps of two rounds: between two rounds, the launches do not depend on the number.
        """
        for rows in sorted({min(rows, most) for rows in VERIFY_ROWS}):
            for drafts in DRAFTS:
                for kind in KINDS[:2]:
                    for start in sorted({1, longest - drafts}):
                        for count in range(1, min(rounds, 2) + 1):
                            if start > 0 and start + count * (1 + drafts) - 1 <= longest:
                                yield self.step([], [], [_Row(start, 1 + drafts, kind, drafts)] * rows, rounds=count)

    def step(
        self,
        decode: Sequence[_Row],
        prompts: Sequence[_Row],
        verify: Sequence[_Row] = (),
        *,
        scored: int = 0,
        masked: bool = False,
        rounds: int = 1,
    ) -> Step:
        """Return the next step of decode rows, verification rows and whole prompts.

        With ``scored``, as many positions of the first prompt are scored. With ``masked``, tokens are sampled under
        masks.
        """
        rows, spec = [*decode, *verify, *prompts], self.spec
        lengths = np.array([row.tokens for row in rows], np.int32)
        ids = np.ones(int(lengths.sum()), np.int32)
        ids[np.cumsum(lengths[: len(decode) + len(verify)]) - lengths[: len(decode) + len(verify)]] = PENDING
        targets = [PromptRange(len(decode), 0, np.ones(scored, np.int32), 2)] if scored else []
        step = Step(
            id=self.next_id,
            req_pool_indices=np.arange(len(rows), dtype=np.int32),
            num_computed_tokens=np.array([row.start for row in rows], np.int32),
            num_scheduled_tokens=lengths,
            num_sampled_tokens=np.array([1 + row.drafts for row in rows], np.int32),
            num_decode=len(decode),
            num_verify=len(verify),
            input_ids=ids,
            page_table_updates=(np.zeros(1, np.int32), np.zeros(1, np.int32), np.full(1, spec.num_pages, np.int32)),
            admissions=tuple(_admission(i, row.params) for i, row in enumerate(rows) if row.params is not None),
            prompt_logprobs=tuple(targets),
            late_sampling=masked,
            rounds=rounds,
        )
        self.next_id += 1
        return step


def _admission(row: int, params: SamplingParams) -> Admission:
    """Return the admission of a request without earlier tokens to a request-pool row."""
    none: I32 = np.empty(0, np.int32)
    return Admission(row, row, params, 0, *((none, none) if params.needs_history else ()))
