"""A logit bias forces or bans tokens of its own request, and costs what the rows of a step need."""

from __future__ import annotations

import numpy as np
import torch

from minisgl.core import I32, Admission, SamplingParams
from minisgl.engine.inputs import SamplingInputs
from minisgl.engine.sampler import PROCESSORS, Sampler
from minisgl.plugins.sampling.logit_bias import LogitBias
from minisgl.testing.samplers import full_sampler

CPU = torch.device("cpu")
VOCAB = 300


def inputs_of(sampler: Sampler, rows: I32) -> SamplingInputs:
    """Return the inputs of a step that samples one token for each of the request-pool rows ``rows``."""
    plan, indices = sampler.plan(rows), torch.from_numpy(rows)
    return SamplingInputs(None, indices, indices, plan, {g: torch.from_numpy(some) for g, some in plan.rows.items()})


def sample(sampler: Sampler, logits: torch.Tensor, rows: I32) -> list[int]:
    """Return the token that each row samples."""
    tokens: list[int] = sampler.sample(logits, inputs_of(sampler, rows)).tolist()
    return tokens


def test_logit_bias() -> None:
    """A logit bias forces or bans tokens, whatever the number of biased tokens of the other rows."""
    params = [
        SamplingParams(temperature=0.0, logit_bias={5: 100.0}),
        SamplingParams(temperature=0.0, logit_bias=dict.fromkeys(range(VOCAB - 1), -100.0)),
        SamplingParams(temperature=0.0),
    ]
    sampler = full_sampler(3, VOCAB, CPU)
    for i, p in enumerate(params):
        sampler.admit([Admission(i, i, p, 0)])
    logits, rows = torch.randn(3, VOCAB), np.array([2, 1, 0], np.int32)
    assert sample(sampler, logits.clone(), rows) == [int(logits[0].argmax()), VOCAB - 1, 5]


def test_bias_costs_the_entries_of_the_step() -> None:
    """A request with many biased tokens does not make the steps of other biased requests wider."""
    small = SamplingParams(temperature=0.0, logit_bias={5: 100.0, 6: -1.0})
    large = SamplingParams(temperature=0.0, logit_bias=dict.fromkeys(range(1, 1025), 1.0))
    sampler = full_sampler(4, 2000, CPU)
    sampler.admit([Admission(0, 0, small, 0), Admission(1, 1, large, 0), Admission(2, 2, SamplingParams(), 0)])
    (processor,) = (p for p in sampler.processors.values() if isinstance(p, LogitBias))
    widths = [processor.width(inputs_of(sampler, np.array(rows, np.int32))) for rows in ([0], [0, 1], [0, 2, 0])]
    assert widths == [2, 1024, 2]
    assert not sampler.plan(np.array([2], np.int32)).flags & PROCESSORS
    sampler.admit([Admission(1, 3, small, 0)])
    assert processor.width(inputs_of(sampler, np.array([1], np.int32))) == 2


def test_bias_of_the_preceding_request_is_gone() -> None:
    """A request does not get the bias of the preceding request in its row, also beside a row with many entries."""
    small = SamplingParams(temperature=0.0, logit_bias={5: -1.0})
    large = SamplingParams(temperature=0.0, logit_bias=dict.fromkeys(range(1, 1025), 1.0))
    sampler = full_sampler(4, 2000, CPU)
    sampler.admit([Admission(0, 0, large, 0), Admission(1, 1, large, 0)])
    sampler.admit([Admission(1, 2, small, 0)])
    rows = np.array([0, 1], np.int32)
    logits = torch.zeros(2, 2000)
    logits[:, 1500] = 0.5
    assert sample(sampler, logits, rows) == [1, 1500]
