"""Tests of promise 8 on models: greedy tokens are those of transformers, whatever the options and the batch.

The output is teacher-forced through transformers in float64. The logit of each token must be within 1e-4 of the
maximum, for all architectures, page sizes, chunk sizes, overlap, caches and numbers of ranks, alone or 32 at a time.
"""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest

from minisgl import LLM, SamplingParams
from minisgl.testing.checkpoints import ARCHITECTURES, WITH_STATES, tiny_checkpoint
from minisgl.testing.idle import check_idle
from minisgl.testing.oracle import Oracle

pytestmark = pytest.mark.xdist_group("test_greedy_oracle")  # one process: the checkpoints are made once

FACTORS = (tuple(ARCHITECTURES), (1, 16), (16, 8192), (True, False), ("radix", "naive"), (1, 2))
# Columns: architecture, page_size, max_prefill_tokens, overlap, cache, tp. For any two columns, each pair of their
# values occurs in some line.
COVER = [
    ("llama", 1, 8192, False, "naive", 1),
    ("llama", 16, 16, True, "radix", 2),
    ("mistral", 1, 16, False, "radix", 2),
    ("mistral", 16, 8192, True, "naive", 1),
    ("qwen2", 16, 16, False, "radix", 1),
    ("qwen2", 1, 8192, True, "naive", 2),
    ("qwen3", 1, 16, True, "naive", 1),
    ("qwen3", 16, 8192, False, "radix", 2),
    ("qwen3_moe", 1, 8192, False, "radix", 2),
    ("qwen3_moe", 16, 16, True, "naive", 1),
    ("smollm3", 16, 16, False, "radix", 2),
    ("smollm3", 1, 8192, True, "naive", 1),
    ("olmo3", 1, 16, True, "radix", 2),
    ("olmo3", 16, 8192, False, "naive", 1),
    ("gemma3", 16, 16, True, "radix", 2),
    ("gemma3", 1, 8192, False, "naive", 1),
    ("gpt_oss", 1, 16, True, "radix", 2),
    ("gpt_oss", 16, 8192, False, "naive", 1),
    ("qwen3_next", 1, 16, True, "radix", 2),
    ("qwen3_next", 16, 8192, False, "naive", 1),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def test_cover_has_every_pair() -> None:
    """``COVER`` contains every pair of values of any two columns."""
    for a, b in combinations(range(len(FACTORS)), 2):
        assert {(row[a], row[b]) for row in COVER} == set(product(FACTORS[a], FACTORS[b]))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Oracle]]:
    made = {}
    for name in ARCHITECTURES:
        # Of the other models, those with windows have shorter ones than most prompts already.
        path = tiny_checkpoint(
            name, tmp_path_factory.mktemp(name), **({"sliding_window": 21} if name == "mistral" else {})
        )
        made[name] = (path, Oracle(path))
    return made


def prompts() -> list[list[int]]:
    """Return 32 prompts of 1 to 70 tokens. Half of them begin with the same 35 tokens, and two are equal."""
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 320, 35).tolist()
    made = [(shared if i % 2 else []) + rng.integers(3, 320, n).tolist() for i, n in enumerate(rng.integers(1, 36, 31))]
    return [*made, made[1]]


@pytest.mark.parametrize(
    ("architecture", "page", "chunk", "overlap", "cache", "tp"), COVER, ids=lambda v: str(v).lower()
)
def test_promise_8_greedy_equals_transformers(
    architecture: str,
    page: int,
    chunk: int,
    overlap: bool,
    cache: str,
    tp: int,
    checkpoints: dict[str, tuple[Path, Oracle]],
) -> None:
    """Greedy tokens of requests alone and of 32 requests together equal those of transformers."""
    path, oracle = checkpoints[architecture]
    words = (
        f"page_size={page} max_prefill_tokens={chunk} overlap={overlap} cache={cache} tp={tp} num_pages={8192 // page}"
    )
    with LLM(str(path), overrides=["device=cpu", "max_running_requests=40", *words.split()]) as llm:
        asked = prompts()
        alone = [llm.generate([asked[i]], GREEDY)[0].token_ids for i in (0, 1, 31)]
        together = [output.token_ids for output in llm.generate(asked, GREEDY)]
        stats = llm.scheduler.stats()
        check_idle(llm.scheduler)
    oracle.check_all([*asked, *(asked[i] for i in (0, 1, 31))], together + alone)
    # The run used the prefix cache if and only if it was on, and did not retract. A page holds no recurrent state.
    assert (stats["cached_tokens"] > 0) == (cache == "radix" and architecture not in WITH_STATES)
    assert stats["retractions"] == 0
    assert all(len(output) == 12 for output in together)


@pytest.mark.parametrize("architecture", ["qwen3", "smollm3", "olmo3", "gemma3", "gpt_oss", "qwen3_next"])
def test_promise_8_with_retractions(architecture: str, checkpoints: dict[str, tuple[Path, Oracle]]) -> None:
    """Retracted requests resume with the same tokens. The pool is too small for all requests, so some are retracted."""
    path, oracle = checkpoints[architecture]
    asked = prompts()[:12]
    long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with LLM(str(path), overrides=["device=cpu", "page_size=4", "num_pages=50"]) as llm:
        outputs = llm.generate(asked, long)
        assert llm.scheduler.stats()["retractions"] > 0
        check_idle(llm.scheduler)
    assert all(len(output.token_ids) == 60 for output in outputs)
    oracle.check_all(asked, [output.token_ids for output in outputs])


def test_promise_8_oracle_finds_wrong_token(checkpoints: dict[str, tuple[Path, Oracle]]) -> None:
    """The oracle of these tests fails for an output with one wrong token."""
    path, oracle = checkpoints["llama"]
    with LLM(str(path), overrides=["device=cpu"]) as llm:
        output = llm.generate([[5, 6, 7]], GREEDY)[0].token_ids
    oracle.check([5, 6, 7], output)
    wrong = [*output[:6], (output[6] + 1) % 320, *output[7:]]
    with pytest.raises(AssertionError, match="output token 6 is"):
        oracle.check([5, 6, 7], wrong)
