"""Tests of the sampler: logits processors against transformers, statistics of draws, independence of other rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import generation as hf

from minisgl.core import Admission, SamplingParams
from minisgl.engine.gumbel import gumbel, seed_key, token_hashes
from minisgl.engine.inputs import SamplingInputs
from minisgl.engine.sampler import Sampler
from minisgl.plugins.sampling.min_p import min_p_threshold
from minisgl.plugins.sampling.top_k_p import PARTIAL_SORT_WIDTH, top_k_p_threshold
from minisgl.testing.samplers import full_sampler

CPU = torch.device("cpu")
VOCAB = 300


def draw(sampler: Sampler, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Run one sampling step for the request-pool rows ``rows``. Return the tokens."""
    indices = np.asarray(rows, np.int32)
    plan = sampler.plan(indices)
    groups = {g: torch.from_numpy(group_rows) for g, group_rows in plan.rows.items()}
    device_positions = torch.tensor(positions, dtype=torch.int32)
    inputs = SamplingInputs(None, torch.from_numpy(indices), device_positions, plan, groups)
    tokens = sampler.sample(logits.clone(), inputs)
    sampler.commit(tokens, inputs, None)
    chosen: list[int] = tokens.tolist()
    return chosen


def sampler_with(params: Sequence[SamplingParams], vocab: int = VOCAB, **history: Any) -> Sampler:
    """Return a sampler with request i admitted into request-pool row i. Its seed is ``params[i].seed``, or else i."""
    sampler = full_sampler(len(params), vocab, CPU)
    sampler.admit([Admission(i, i, p, p.seed if p.seed is not None else i, **history) for i, p in enumerate(params)])
    return sampler


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


# ---- logits processors against transformers -------------------------------------------------


@pytest.mark.parametrize("top_k", [0, 1, 7, 290])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_thresholds_equal_transformers(top_k: int, top_p: float, min_p: float, temperature: float) -> None:
    """Top-k, top-p and min-p keep the same tokens as the processors of transformers."""
    logits = random_logits(8)
    ids = torch.zeros(8, 1, dtype=torch.long)
    expected = hf.TemperatureLogitsWarper(temperature)(ids, logits)
    if top_k:
        expected = hf.TopKLogitsWarper(top_k)(ids, expected)
    if top_p < 1.0:
        expected = hf.TopPLogitsWarper(top_p)(ids, expected)
    if min_p:
        expected = hf.MinPLogitsWarper(min_p)(ids, expected)

    scaled = logits / temperature
    ks, ps, ms = torch.full((8,), top_k), torch.full((8,), top_p), torch.full((8,), min_p)
    width = PARTIAL_SORT_WIDTH if 0 < top_k <= PARTIAL_SORT_WIDTH else VOCAB
    kept = scaled.masked_fill(scaled < top_k_p_threshold(scaled, ks, ps, width), -torch.inf)
    torch.testing.assert_close(kept.masked_fill(kept < min_p_threshold(kept, ms), -torch.inf), expected)


# ---- the draw ----------------------------------------------------------------------------------


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """Return the standardised chi-square statistic. By chance it is above 5 about once in a million tests."""
    expected = counts.sum() * probs
    stat = float(((counts - expected) ** 2 / expected).sum())
    df = len(probs) - 1
    return (stat - df) / (2 * df) ** 0.5


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_follow_distribution(vary: str) -> None:
    """Tokens drawn with consecutive seeds or at consecutive positions follow softmax(logits / temperature)."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -2.0, 1.5, 0.0])
    n = 40_000
    params = SamplingParams(temperature=0.8)
    if vary == "seed":
        sampler = full_sampler(n, 8, CPU)
        sampler.admit([Admission(i, i, params, i) for i in range(n)])
        tokens = draw(sampler, logits.expand(n, 8), range(n), [17] * n)
    else:
        tokens = draw(sampler_with([params], 8), logits.expand(n, 8), [0] * n, range(n))
    probs = (logits / 0.8).softmax(0).double().numpy()
    assert chi_square(np.bincount(tokens, minlength=8), probs) < 5
    pairs = np.asarray(tokens[::2]) * 8 + np.asarray(tokens[1::2])  # consecutive seeds or positions are independent
    assert chi_square(np.bincount(pairs, minlength=64), np.outer(probs, probs).ravel()) < 5


def test_noise_statistics() -> None:
    """Mean, variance and tail of the noise are those of the Gumbel distribution; rows and tokens are uncorrelated."""
    keys = torch.tensor([seed_key(s) for s in range(64)], dtype=torch.int32)
    noise = gumbel(keys, torch.arange(64, dtype=torch.int32), token_hashes(20_000, CPU)).double()
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.5772156649) < 0.005  # 1.28 million samples: sigma 0.0011
    assert abs(noise.var() - np.pi**2 / 6) < 0.02
    assert abs((noise > 8).double().mean() / (1 - np.exp(-np.exp(-8.0))) - 1) < 0.15
    assert (torch.corrcoef(noise) - torch.eye(64)).abs().max() < 0.05  # rows: sigma 0.007
    assert (torch.corrcoef(noise.T[:64]) - torch.eye(64)).abs().max() < 0.7  # tokens: 64 samples each


def test_row_does_not_depend_on_other_rows() -> None:
    """A row samples exactly the same token alone, and in any row of any batch with other parameters."""
    params = [
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=0.7, top_k=40, top_p=0.9, seed=6),
        SamplingParams(temperature=1.3, top_p=0.8, min_p=0.02, seed=7),
        SamplingParams(temperature=1.3, top_k=280, seed=7),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.5, seed=8),
        SamplingParams(temperature=0.9, logit_bias={3: 5.0, 17: -100.0}, seed=9),
        SamplingParams(temperature=1.0, seed=-(2**63), logprobs=4),
    ]
    logits, positions = random_logits(8), [100, 3, 70_000, 4, 5, 6, 7, 8]
    history = {"prompt_ids": np.arange(9, dtype=np.int32), "output_ids": np.array([50, 50, 60], np.int32)}
    rng = np.random.default_rng(0)
    alone = [draw(sampler_with(params, **history), logits[i : i + 1], [i], [positions[i]])[0] for i in range(8)]
    for _ in range(30):
        order = rng.permutation(8)[: rng.integers(1, 9)]
        tokens = draw(sampler_with(params, **history), logits[order], list(order), [positions[i] for i in order])
        assert tokens == [alone[i] for i in order]


def test_retracted_request_draws_the_same() -> None:
    """A retracted request that is admitted again into another request-pool row samples the same tokens."""
    params = SamplingParams(temperature=1.0, repetition_penalty=1.5, presence_penalty=0.3, logit_bias={1: 2.0})
    prompt = np.array([4, 5, 6], np.int32)
    steps = [random_logits(1, seed=s) for s in range(8)]

    first = full_sampler(4, VOCAB, CPU)
    first.admit([Admission(0, 1, params, 77, prompt, np.empty(0, np.int32))])
    whole = [draw(first, logits, [0], [3 + i])[0] for i, logits in enumerate(steps)]

    second = full_sampler(4, VOCAB, CPU)
    others = np.arange(0, VOCAB, 2, dtype=np.int32)
    second.admit([Admission(3, 9, params, 1, others, others + 1)])  # the row's history has every token
    draw(second, steps[0], [3], [3])
    second.admit([Admission(3, 1, params, 77, prompt, np.array(whole[:4], np.int32))])  # resumes at the fifth token
    resumed = [draw(second, steps[i], [3], [3 + i])[0] for i in range(4, 8)]
    assert resumed == whole[4:]


def test_greedy_after_another_request() -> None:
    """A greedy row takes the first maximum; parameters of an earlier request in the same row have no effect."""
    sampler = sampler_with([SamplingParams(temperature=2.0, top_k=3, logit_bias={0: 100.0}, logprobs=2)])
    sampler.admit([Admission(0, 2, SamplingParams(temperature=0.0), 0)])
    logits = torch.zeros(1, VOCAB)
    logits[0, [7, 9]] = 1.0
    assert draw(sampler, logits, [0], [5]) == [7]


def test_extreme_parameters() -> None:
    """Extreme parameters do not give NaN or infinity: near-greedy rows choose the argmax."""
    params = [
        SamplingParams(temperature=1e-30),
        SamplingParams(temperature=100.0, top_p=1e-9),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, min_p=1.0),
        SamplingParams(temperature=0.01, top_k=-1, top_p=0.999999),
    ]
    logits = random_logits(5) * 30
    tokens = draw(sampler_with(params), logits, range(5), [2**31 - 1] * 5)
    assert tokens[:4] == logits.argmax(1).tolist()[:4]


def test_greedy_batch_allocates_no_state() -> None:
    """Token hashes are not allocated for greedy requests, and their plan has no flags."""
    sampler = sampler_with([SamplingParams(temperature=0.0)] * 4)
    assert sampler.plan(np.arange(4, dtype=np.int32)) == (0, {}, None)
    draw(sampler, random_logits(4), range(4), [1] * 4)
    assert sampler._hashes is None
