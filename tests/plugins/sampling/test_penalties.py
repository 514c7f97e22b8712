"""Penalties equal those of transformers and OpenAI's definition, and count drafts as if they had been sampled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import generation as hf

from minisgl.core import Admission, EngineSpec, SamplingParams
from minisgl.engine.inputs import InputBuilder
from minisgl.plugins.sampling.penalties import Penalties, apply_penalties
from minisgl.plugins.speculation.verification import verifying_inputs
from minisgl.testing.samplers import full_sampler
from minisgl.testing.steps import RowSpec, StepWriter

CPU = torch.device("cpu")
VOCAB = 300


@pytest.mark.parametrize("penalty", [0.7, 1.3])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    """The repetition penalty counts tokens of prompt and output, as in transformers."""
    logits, history = (
        torch.randn(4, VOCAB) * 3,
        torch.randint(0, VOCAB, (4, 40), generator=torch.Generator().manual_seed(1)),
    )
    expected = hf.RepetitionPenaltyLogitsProcessor(penalty)(history, logits)
    seen = torch.zeros(4, VOCAB, dtype=torch.int32).scatter_(1, history[:, :25], 1)
    seen.scatter_add_(1, history[:, 25:], torch.full((4, 15), 2, dtype=torch.int32))
    zero = torch.zeros(4)
    got = apply_penalties(logits, seen, torch.full((4,), penalty), zero, zero)
    torch.testing.assert_close(got, expected)


def test_presence_and_frequency_penalties() -> None:
    """The presence and frequency penalties apply to tokens of the output only, as OpenAI defines them."""
    logits = torch.zeros(1, 4)
    seen = torch.tensor([[1, 2, 6, 0]], dtype=torch.int32)  # token 0 is in the prompt, 1 and 2 in the output
    presence, frequency = torch.tensor([0.5]), torch.tensor([0.25])
    got = apply_penalties(logits, seen, torch.ones(1), presence, frequency)
    assert got.tolist() == [[0.0, -0.75, -1.25, 0.0]]  # OpenAI: mu - c * frequency - (c > 0) * presence


def test_penalties_see_drafts_before_a_position() -> None:
    """With ``frequency_penalty`` 2, three positions whose likeliest tokens are 4 and 5 give [4, 5, 4], not [4, 4, 4].

    The history then has the accepted tokens: 4 and 5 if the second draft is wrong.
    """
    sampler, builder = full_sampler(4, 8, CPU), InputBuilder(EngineSpec(4, 40, 4, 40, 8), CPU)
    builder.verifying_inputs = verifying_inputs
    empty = np.empty(0, np.int32)
    sampler.admit([Admission(2, 0, SamplingParams(temperature=0.0, frequency_penalty=2.0), 0, empty, empty)])
    logits = torch.zeros(1, 8)
    logits[0, 4], logits[0, 5] = 3.0, 2.0
    writer = StepWriter(EngineSpec(4, 40, 4, 40, 8))
    for drafts, counts in (([4, 5], [2, 1]), ([4, 4], [1, 1])):
        step = writer.step(RowSpec.verify(2, 10, drafts, 1))
        builder.update_page_table(step)
        plan = sampler.plan(np.repeat(step.req_pool_indices, 3))
        inputs = builder.sampling_inputs(step, plan, builder.build(step)[1])
        sampled = sampler.sample(logits.repeat(3, 1), inputs)
        assert sampled.tolist() == [4, 5, 4] if drafts == [4, 5] else [4, 5, 5]
        assert inputs.verification is not None
        accepted = inputs.verification.accept(sampled)
        assert accepted.length.tolist() == [3 if drafts == [4, 5] else 2]
        sampler.commit(sampled, inputs, accepted)
        (history,) = (p.history for p in sampler.processors.values() if isinstance(p, Penalties))
        assert (history[2, 4:6] >> 1).tolist() == counts
        history.zero_()
