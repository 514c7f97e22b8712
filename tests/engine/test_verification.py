"""Tests of several sampled positions per row: sampling them at once equals sampling them one by one.

Logits come from a function of request, position and preceding token, so no model is needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from minisgl.core import (
    Admission,
    EngineSpec,
    InvalidRequestError,
    Logprobs,
    SamplingParams,
    Step,
    StepResult,
    TokenMasks,
)
from minisgl.engine import logits_processors
from minisgl.engine.inputs import InputBuilder
from minisgl.engine.model_runner import read_tokens
from minisgl.engine.sampler import Sampler, state_bytes
from minisgl.plugins.sampling.logprobs import SampledLogprobs
from minisgl.plugins.speculation.verification import DraftVerification, verification_arrays, verifying_inputs
from minisgl.testing.samplers import full_sampler
from minisgl.testing.steps import RowSpec, StepWriter

CPU = torch.device("cpu")
VOCAB = 300
SPEC = EngineSpec(page_size=4, num_pages=400, max_running_requests=10, max_seq_len=160, vocab_size=VOCAB)
PROMPT = [5, 6, 7, 8, 9, 5]


def logits_of(uid: int, position: int, token: int) -> torch.Tensor:
    """Return the logits of the token after ``token``, which request ``uid`` has at ``position``: a random row."""
    generator = torch.Generator().manual_seed(uid * 1_000_003 + position * 1_009 + token)
    return torch.randn(VOCAB, generator=generator) * 3


class Sampling:
    """The parts of an engine that build the inputs of sampling and sample, with `logits_of` instead of a model."""

    def __init__(self, params: list[SamplingParams]):
        self.builder, self.sampler = InputBuilder(SPEC, CPU), full_sampler(SPEC.max_running_requests, VOCAB, CPU)
        self.builder.verifying_inputs = verifying_inputs
        history = {"prompt_ids": np.array(PROMPT, np.int32), "output_ids": np.array([50, 50, 60], np.int32)}
        self.sampler.admit([Admission(i, i, p, 100 + i, **history) for i, p in enumerate(params)])

        (self.logprobs,) = (p for p in self.sampler.processors.values() if isinstance(p, SampledLogprobs))

    def run(self, step: Step, masks: TokenMasks | None = None) -> StepResult:
        """Sample the step as the engine does. All its input ids must be known."""
        self.builder.update_page_table(step)
        _, batch = self.builder.build(step)
        repeated = np.repeat(step.req_pool_indices, step.num_sampled_tokens)
        inputs = self.builder.sampling_inputs(step, self.sampler.plan(repeated), batch)
        rows = [
            logits_of(int(uid), int(position) - 1, int(step.input_ids[index]))
            for uid, position, index in zip(
                repeated, inputs.positions, inputs.logits_indices if inputs.logits_indices is not None else range(99)
            )
        ]
        tokens, accepted = self.sampler.sample(torch.stack(rows), inputs, masks), None
        tensors = {"tokens": tokens}
        if inputs.verification is not None:
            accepted = inputs.verification.accept(tokens)
            tensors["accepted"] = accepted.length
        tensors |= self.sampler.commit(tokens, inputs, accepted)
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        result = StepResult(step.id, *read_tokens(step, arrays))
        return self.logprobs.read(step, result, arrays) if "chosen" in arrays else result


def one_by_one(params: list[SamplingParams], tokens: int) -> tuple[list[list[int]], list[list[Logprobs | None]]]:
    """Return ``tokens`` output tokens of each request, and their log-probabilities, sampled one at a time."""
    sampling, writer = Sampling(params), StepWriter(SPEC)
    outputs: list[list[int]] = [[1] for _ in params]
    logprobs: list[list[Logprobs | None]] = [[] for _ in params]
    for i in range(tokens):
        rows = [RowSpec.decode(uid, 10 + i, output[-1]) for uid, output in enumerate(outputs)]
        result = sampling.run(writer.step(*rows))
        for uid, output in enumerate(outputs):
            output.append(int(result.tokens[uid, 0]))
            entries = result.logprobs[uid] if result.logprobs is not None else None
            logprobs[uid].append(entries[0] if entries is not None else None)
    return [output[1:] for output in outputs], logprobs


ALL_PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, frequency_penalty=2.0, logprobs=0),
    SamplingParams(temperature=1.0, logprobs=3),
    SamplingParams(temperature=0.7, top_k=40, top_p=0.9),
    SamplingParams(temperature=1.3, top_p=0.8, min_p=0.02, presence_penalty=1.5),
    SamplingParams(temperature=1.3, top_k=280, repetition_penalty=0.7),
    SamplingParams(temperature=0.9, repetition_penalty=1.2, frequency_penalty=-0.5, logprobs=20),
    SamplingParams(temperature=0.9, logit_bias={3: 5.0, 17: -100.0}),
    SamplingParams(temperature=0.0, logit_bias=dict.fromkeys(range(150), -50.0), presence_penalty=-2.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.8, logprobs=2),
]


@pytest.mark.parametrize("params", [ALL_PARAMS, ALL_PARAMS[:1] * 4, ALL_PARAMS[1:2] * 3], ids=["all", "greedy", "one"])
@pytest.mark.parametrize("seed", range(4))
def test_several_positions_equal_one_by_one(params: list[SamplingParams], seed: int) -> None:
    """Verification rows with right and wrong drafts give the tokens and log-probabilities of sampling one by one.

    Steps mix decode rows, verification rows and chunks that sample or not. The histories are kept over all steps.
    """
    outputs, logprobs = one_by_one(params, 30)
    rng, sampling, writer = np.random.default_rng(seed), Sampling(params), StepWriter(SPEC)
    done = [0] * len(params)
    mixed = False
    while min(done) < 22:
        rows: list[RowSpec] = []
        for uid in rng.permutation(len(params))[: rng.integers(1, len(params) + 1)].tolist():
            known = [1, *outputs[uid]][done[uid] :]  # the last token and the tokens that will be sampled
            if len(known) < 8:
                continue
            kind, length = rng.integers(4), int(rng.integers(1, 7))
            if kind == 0:
                rows.append(RowSpec.decode(uid, 10 + done[uid], known[0]))
            elif kind == 1:  # a chunk whose last token is the request's last token
                start = 10 + done[uid] - length
                samples = int(rng.integers(2))
                rows.append(RowSpec(uid, start, [2] * length + known[:1], samples, chunk=True))
            else:
                right = int(rng.integers(length + 1))
                wrong = [(token + 1) % VOCAB for token in known[1 + right : 1 + length]]
                rows.append(RowSpec.verify(uid, 10 + done[uid], known[1 : 1 + right] + wrong, known[0]))
        if not rows:
            continue
        step = writer.step(*rows)
        if not step.num_sampled_tokens.any():
            continue
        mixed |= 0 < step.num_verify < step.rows
        result = sampling.run(step)
        for i, uid in enumerate(step.req_pool_indices.tolist()):
            count, sampled = int(result.accepted[i]), int(step.num_sampled_tokens[i])
            first = 1 + int(np.cumsum(step.num_scheduled_tokens)[i]) - sampled
            drafts = step.input_ids[first : first + sampled - 1].tolist()
            future = outputs[uid][done[uid] :]
            right = next((n for n, draft in enumerate(drafts) if draft != future[n]), len(drafts))
            assert count == (0 if sampled == 0 else 1 + right)
            assert result.tokens[i, :count].tolist() == future[:count]
            assert not result.tokens[i, count:].any()
            expected = logprobs[uid][done[uid] : done[uid] + count]
            if result.logprobs is None or result.logprobs[i] is None:
                assert all(entry is None for entry in expected)
            else:
                _assert_close(result.logprobs[i], expected)
            done[uid] += count
    assert mixed or len(params) < len(ALL_PARAMS)


def _assert_close(got: Any, expected: Any) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.top_ids == b.top_ids
        assert (a.chosen, *a.top) == pytest.approx((b.chosen, *b.top), abs=1e-5)


def test_accept_equals_plain_loop() -> None:
    """`DraftVerification.accept` gives the lengths and last tokens of a loop over rows and drafts."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        writer = StepWriter(SPEC)
        rows = []
        for uid in range(int(rng.integers(1, 9))):
            drafts = rng.integers(0, 3, rng.integers(0, 6)).tolist()
            rows.append(
                RowSpec.verify(uid, 3, drafts, 0) if drafts else RowSpec(uid, 3, [0, 1], int(rng.integers(2)), True)
            )
        step = writer.step(*rows)
        if not step.num_sampled_tokens.any():
            continue
        tokens = rng.integers(0, 3, step.num_sampled_tokens.sum())
        arrays = verification_arrays(step)
        assert all(array.dtype == np.int32 for array in arrays)
        verification = DraftVerification(*map(torch.from_numpy, arrays))
        accepted = verification.accept(torch.from_numpy(tokens))
        lengths, last, counts, first, begin = [], [], [], 0, 0
        for scheduled, sampled in zip(step.num_scheduled_tokens.tolist(), step.num_sampled_tokens.tolist()):
            own, ids = tokens[begin : begin + sampled].tolist(), step.input_ids[first : first + scheduled].tolist()
            first, begin = first + scheduled, begin + sampled
            if not sampled:
                continue
            length = 1
            while length < sampled and ids[length] == own[length - 1]:
                length += 1
            lengths.append(length)
            last.append(own[length - 1])
            counts += [True] * length + [False] * (sampled - length)
        assert accepted.length.tolist() == lengths
        assert accepted.last.tolist() == last
        assert verification.counts(accepted).tolist() == counts
        assert len(set(verification.req_pool_indices.tolist())) == len(lengths)


# ---- masks -------------------------------------------------------------------------------------------


def pack(allowed: np.ndarray) -> np.ndarray:
    """Return the bits of masks, int32 [masks, words], from booleans [masks, vocab]."""
    padded = np.zeros((len(allowed), -(-allowed.shape[1] // 32) * 32), bool)
    padded[:, : allowed.shape[1]] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [31, 32, 64, 300])
def test_mask_tokens(vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """`mask_tokens` sets exactly the forbidden tokens of the given rows to -inf, also in several blocks."""
    monkeypatch.setattr(logits_processors, "MASK_BYTES", 2 * 4 * 32 * -(-vocab // 32))
    rng = np.random.default_rng(vocab)
    allowed, rows = rng.random((5, vocab)) < 0.5, np.array([6, 0, 3, 2, 5], np.int32)
    logits = torch.randn(7, vocab).to(dtype)
    expected = logits.clone()
    for row, mask in zip(rows.tolist(), allowed, strict=True):
        expected[row, torch.from_numpy(~mask)] = -torch.inf
    logits_processors.mask_tokens(logits, torch.from_numpy(rows), torch.from_numpy(pack(allowed)))
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)


@pytest.mark.parametrize("params", ALL_PARAMS, ids=str)
def test_masked_positions_sample_allowed_tokens(params: SamplingParams) -> None:
    """A masked position samples an allowed token under all parameters; others and log-probabilities do not change."""
    sampling, plain, writer = Sampling([params] * 6), Sampling([params] * 6), StepWriter(SPEC)
    rows = [RowSpec.decode(0, 10, 1), RowSpec.verify(1, 10, [7, 8, 9], 1), RowSpec.decode(2, 10, 1)]
    step = writer.step(*rows)
    positions = np.array([1, 3, 4], np.int32)  # row 2, and the second and third position of row 1's verification
    allowed = np.zeros((3, VOCAB), bool)
    allowed[:, [3, 7, 150, 299]] = True
    masked, free = sampling.run(step, TokenMasks(positions, pack(allowed))), plain.run(step)
    assert int(masked.tokens[1, 0]) in {3, 7, 150, 299}
    assert masked.tokens[0].tolist() == free.tokens[0].tolist()
    assert masked.tokens[2, 0] == free.tokens[2, 0]
    if params.logprobs:
        assert masked.logprobs is not None
        assert free.logprobs is not None
        entry, other = masked.logprobs[1], free.logprobs[1]
        assert entry is not None
        assert other is not None
        assert entry[0].top_ids == other[0].top_ids  # the model's own distribution


def test_mask_makes_a_draft_right() -> None:
    """A draft is accepted if the mask leaves only the drafts, and rejected if the mask forbids it."""
    sampling, writer = Sampling([SamplingParams(temperature=0.0)]), StepWriter(SPEC)
    allowed = np.zeros((3, VOCAB), bool)
    allowed[0, 7] = allowed[1, 9] = allowed[2, 4] = True
    step = writer.step(RowSpec.verify(0, 10, [7, 8], 1))
    result = sampling.run(step, TokenMasks(np.arange(3, dtype=np.int32), pack(allowed)))
    assert result.accepted.tolist() == [2]
    assert result.tokens.tolist() == [[7, 9, 0]]


# ---- state -------------------------------------------------------------------------------------------


def test_logit_bias_is_limited() -> None:
    """More than 1,024 entries are refused, by a message that does not list them."""
    SamplingParams(logit_bias=dict.fromkeys(range(1024), 1.0)).check(2000)
    with pytest.raises(InvalidRequestError, match="logit_bias must be at most 1024 token ids") as refused:
        SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0)).check(2000)
    assert refused.value.field == "logit_bias"
    assert len(str(refused.value)) < 200


def test_state_bytes_count_all_tensors() -> None:
    """`state_bytes` counts every tensor that a sampler keeps, whatever the requests, but for those of processors."""
    sampler = Sampler(SPEC.max_running_requests, VOCAB, CPU)
    sampler._hashes = torch.zeros(VOCAB, dtype=torch.int32)
    kept = [value for value in vars(sampler).values() if isinstance(value, torch.Tensor)]
    assert len(kept) == 2
    assert sum(t.nbytes for t in kept) == state_bytes(SPEC.max_running_requests, VOCAB)
