"""Checks that an engine which verifies drafts samples the same as an engine that decodes one token at a time.

The engine needs at least 8 request-pool rows of 60 positions, and a vocabulary of at least 320 tokens. The steps are
written by hand (`minisgl.testing.steps`); no scheduler takes part.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from minisgl.core import Engine, Logprobs, SamplingParams, Step, StepResult, TokenMasks
from minisgl.testing.steps import RowSpec, StepWriter

__all__ = [
    "PARAMS",
    "PROMPTS",
    "Decoded",
    "check_rounds",
    "check_verification",
    "decode_one_by_one",
    "follow",
    "run_step",
]

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, frequency_penalty=1.5, logprobs=2),
    SamplingParams(temperature=1.0, logprobs=0),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.3),
    SamplingParams(temperature=1.2, min_p=0.02, logit_bias={7: 3.0}),
    SamplingParams(temperature=1.0, logit_bias={7: 60.0, 8: 60.0}),  # two tokens only, so that they repeat
]
PROMPTS = [[5 + i, *range(20 + 3 * i, 30 + 4 * i)] for i in range(len(PARAMS))]
"""The requests of these checks: sampling parameters and prompts."""
IDLE_ROW = 7  # request-pool row of a request that takes part in steps, but is not checked


class Decoded(NamedTuple):
    """Output tokens of each request, and their log-probabilities (None: not asked for)."""

    tokens: list[list[int]]
    logprobs: list[list[Logprobs | None]]


def run_step(engine: Engine, step: Step) -> StepResult:
    """Launch the step, sample it without masks if it samples late, and return its result."""
    engine.launch(step)
    if step.late_sampling:
        words = -(-engine.spec.vocab_size // 32)
        engine.sample(TokenMasks(np.empty(0, np.int32), np.empty((0, words), np.int32)))
    return engine.result()


def _admit(engine: Engine, writer: StepWriter, *, rounds: bool = False) -> StepResult:
    """Compute the prompts of all requests in one step.

    For steps of several ``rounds`` the engine gets their tokens, and they ask for no log-probabilities.
    """
    rows = []
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        params = msgspec.structs.replace(params, logprobs=None) if rounds else params
        rows.append(RowSpec.prompt(i, prompt, params, seed=50 + i, with_tokens=rounds))
    return run_step(engine, writer.step(*rows))


def decode_one_by_one(engine: Engine, count: int) -> Decoded:
    """Return ``count`` tokens of each request, computed in steps of decode rows only."""
    writer = StepWriter(engine.spec)
    results = [_admit(engine, writer)]
    for i in range(count - 1):
        rows = [RowSpec.decode(uid, len(prompt) + i) for uid, prompt in enumerate(PROMPTS)]
        results.append(run_step(engine, writer.step(*rows)))
    tokens = np.stack([result.tokens[:, 0] for result in results], 1).tolist()
    logprobs: list[list[Logprobs | None]] = [[] for _ in PROMPTS]
    for result in results:
        assert result.logprobs is not None
        for uid, entries in enumerate(result.logprobs):
            logprobs[uid].append(entries[0] if entries is not None else None)
    return Decoded(tokens, logprobs)


def check_verification(engine: Engine, expected: Decoded, seed: int, *, late: bool = False, eps: float = 1e-4) -> None:
    """Check that steps with random right and wrong drafts give the tokens and log-probabilities of ``expected``.

    A step may also have decode rows, and a chunk of a request that is not used otherwise.
    """
    tokens, logprobs = expected
    writer, rng = StepWriter(engine.spec), np.random.default_rng(seed)
    first = _admit(engine, writer)
    assert [int(t) for t in first.tokens[:, 0]] == [t[0] for t in tokens]
    done, several = [1] * len(PROMPTS), False
    while min(done) < 30:
        rows = []
        for uid, count in enumerate(done):
            future = tokens[uid][count:]
            if len(future) < 8 or rng.random() < 0.2:
                continue
            position, last = len(PROMPTS[uid]) + count - 1, tokens[uid][count - 1] if rng.random() < 0.3 else -1
            right, length = sorted(rng.integers(0, 7, 2).tolist())
            wrong = [(token + 1) % 320 for token in future[right:length]]
            rows.append(RowSpec.verify(uid, position, future[:right] + wrong, last))
        if rng.random() < 0.5:
            rows.append(RowSpec.prompt(IDLE_ROW, rng.integers(3, 320, 9).tolist(), SamplingParams(logprobs=1)))
        if not rows:
            continue
        step = writer.step(*rows, late_sampling=late)
        result = run_step(engine, step)
        several |= bool((result.accepted > 1).any())
        assert result.id == step.id
        assert result.tokens.dtype == result.accepted.dtype == np.int32
        assert result.tokens.shape == (step.rows, step.num_sampled_tokens.max())
        for row, uid in enumerate(step.req_pool_indices.tolist()):
            if uid != IDLE_ROW:
                done[uid] += _check_row(step, result, row, tokens[uid][done[uid] :], logprobs[uid][done[uid] :], eps)
    assert several, "no draft was right"


def _check_row(
    step: Step, result: StepResult, row: int, tokens: list[int], logprobs: list[Logprobs | None], eps: float
) -> int:
    """Compare a row's result with the next ``tokens`` and ``logprobs`` of its request. Return the accepted number."""
    accepted, begin = int(result.accepted[row]), int(step.num_scheduled_tokens[:row].sum())
    drafts = step.input_ids[begin + 1 : begin + int(step.num_scheduled_tokens[row])].tolist()
    right = next((n for n, draft in enumerate(drafts) if draft != tokens[n]), len(drafts))
    assert accepted == right + 1, f"row {row}: {right} drafts are right, but {accepted} tokens were accepted"
    got = result.tokens[row, :accepted].tolist()
    assert got == tokens[:accepted], f"row {row}: expected {tokens[:accepted]}, got {got}"
    entries = None if result.logprobs is None else result.logprobs[row]
    assert (entries is None) == (logprobs[0] is None), f"row {row}: log-probabilities are missing or not asked for"
    for entry, expected in zip(entries or (), logprobs, strict=False):
        assert expected is not None
        assert entry.top_ids == expected.top_ids
        np.testing.assert_allclose((entry.chosen, *entry.top), (expected.chosen, *expected.top), rtol=0, atol=eps)
    assert entries is None or len(entries) == accepted
    return accepted


def check_rounds(engine: Engine, expected: Decoded, seed: int) -> None:
    """Check that steps of several rounds give the tokens of ``expected``, and draft what `follow` predicts.

    Between them are steps of one round: of decode rows, and of verification rows with decode rows.
    """
    tokens = expected.tokens
    writer, rng = StepWriter(engine.spec), np.random.default_rng(seed)
    _admit(engine, writer, rounds=True)
    done, several, later = [1] * len(PROMPTS), 0, 0
    while min(done) < 30:
        width, rounds = int(rng.integers(2, 5)), int(rng.integers(1, 4))
        rows, uids = [], []
        for uid, count in enumerate(done):
            if len(tokens[uid]) - count <= width * rounds or rng.random() < 0.2:
                continue
            uids.append(uid)
            position, last = len(PROMPTS[uid]) + count - 1, tokens[uid][count - 1] if rng.random() < 0.3 else -1
            if rounds == 1 and rng.random() < 0.3:
                rows.append(RowSpec.decode(uid, position))
                continue
            right = int(rng.integers(0, width))
            future = tokens[uid][count : count + width - 1]
            drafts = [token if i < right else (token + 1) % 320 for i, token in enumerate(future)]
            rows.append(RowSpec.verify(uid, position, drafts, last))
        if not rows:
            continue
        step = writer.step(*rows, rounds=rounds)
        result = run_step(engine, step)
        assert (result.rounds is None) == (rounds == 1)
        assert result.tokens.dtype == result.accepted.dtype == np.int32
        assert result.tokens.shape == (step.rows, step.num_sampled_tokens.max() * rounds)
        for row, uid in enumerate(step.req_pool_indices.tolist()):
            future, count = tokens[uid][done[uid] :], int(result.accepted[row])
            assert result.tokens[row, :count].tolist() == future[:count], f"row {row} of a step of {rounds} rounds"
            assert (result.tokens[row, count:] == 0).all()
            begin = int(step.num_scheduled_tokens[:row].sum())
            drafts = step.input_ids[begin + 1 : begin + int(step.num_scheduled_tokens[row])].tolist()
            end = 0
            for number in range(rounds):
                if number:
                    drafts = follow([*PROMPTS[uid], *tokens[uid][: done[uid]], *future[:end]], width - 1)
                right = next((n for n, draft in enumerate(drafts) if draft != future[end + n]), len(drafts))
                if result.rounds is not None:
                    assert result.rounds[number, row] == right + 1, f"round {number} of row {row}: the drafts {drafts}"
                    several, later = several + (right > 0), later + (number > 0 and right > 0)
                end += right + 1
            assert end == count
            done[uid] += count
    assert several > later > 0, "no draft was right in the first round, or in the later ones"


def follow(ids: list[int], count: int) -> list[int]:
    """Return the ``count`` tokens that followed the last four tokens, or else two, where they occurred last."""
    for size in (4, 2):
        for end in range(len(ids) - 1, size - 1, -1):
            if ids[end - size : end] == ids[-size:]:
                return [ids[end + i % (len(ids) - end)] for i in range(count)]
    return [ids[-1]] * count
