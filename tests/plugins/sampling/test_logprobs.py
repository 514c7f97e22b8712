"""Tests of the log-probabilities of sampled tokens. tests/engine compares them with transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl.core import Admission, EngineSpec, Logprobs, SamplingParams, StepResult
from minisgl.engine.inputs import SamplingInputs
from minisgl.plugins.sampling.logprobs import SampledLogprobs
from minisgl.testing.samplers import full_sampler
from minisgl.testing.steps import RowSpec, StepWriter

SPEC = EngineSpec(page_size=4, num_pages=40, max_running_requests=4, max_seq_len=40, vocab_size=30)


def test_logprobs_are_those_of_the_model() -> None:
    """They are those of the logits before temperature, top-k and bias, for the rows that ask for them.

    The results of three steps are read after the third, in which another request has one of the rows.
    """
    params = [
        SamplingParams(temperature=2.0, top_k=5, logprobs=3, logit_bias={4: 2.0}),
        SamplingParams(),
        SamplingParams(logprobs=0),
    ]
    sampler = full_sampler(4, 30, torch.device("cpu"))
    sampler.admit([Admission(i, i, p, i) for i, p in enumerate(params)])
    (processor,) = (p for p in sampler.processors.values() if isinstance(p, SampledLogprobs))
    logits, writer = torch.randn(3, 30, generator=torch.Generator().manual_seed(1)) * 3, StepWriter(SPEC)
    expected, launched = logits.log_softmax(1), []
    for rows in ([0, 1, 2], [1], [2, 0]):
        if rows == [1]:
            sampler.admit([Admission(2, 9, SamplingParams(logprobs=1), 9)])
        indices = np.array(rows, np.int32)
        plan, device = sampler.plan(indices), torch.from_numpy(indices)
        groups = {flag: torch.from_numpy(some) for flag, some in plan.rows.items()}
        inputs = SamplingInputs(None, device, device, plan, groups)
        tokens = sampler.sample(logits[rows].clone(), inputs)
        launched.append((rows, tokens, sampler.commit(tokens, inputs, None)))
    for (rows, tokens, tensors), numbers in zip(launched, ([3, None, 0], [None], [1, 3]), strict=True):
        assert bool(tensors) == (rows != [1])
        if not tensors:
            continue
        step = writer.step(*(RowSpec.decode(row, 1) for row in rows))
        result = StepResult(step.id, tokens[:, None].int().numpy(), np.ones(len(rows), np.int32))
        found = processor.read(step, result, {name: tensor.numpy() for name, tensor in tensors.items()}).logprobs
        assert found is not None
        for row, token, number, entries in zip(rows, tokens, numbers, found, strict=True):
            if number is None:
                assert entries is None
                continue
            best = expected[row].topk(number)
            ids, top = tuple(best.indices.tolist()), pytest.approx(tuple(best.values.tolist()), abs=1e-5)
            assert entries == (Logprobs(pytest.approx(float(expected[row, token]), abs=1e-5), ids, top),)
