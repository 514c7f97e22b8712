"""Promise 8 on models: every greedy token, teacher-forced through transformers in float64, is within 1e-4 of the
maximum, whatever the architecture, page size, chunk, overlap, cache and number of ranks, alone or 32 at a time."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest

from minisgl import LLM, SamplingParams
from minisgl.testing.checkpoints import ARCHITECTURES, tiny_checkpoint
from minisgl.testing.oracle import Oracle

FACTORS = (tuple(ARCHITECTURES), (1, 16), (16, 8192), (True, False), ("radix", "naive"), (1, 2))
# architecture, page_size, max_prefill_tokens, overlap, cache, tp: every pair of values of two of them is here
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
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def test_the_covering_set_has_every_pair() -> None:
    for a, b in combinations(range(len(FACTORS)), 2):
        assert {(row[a], row[b]) for row in COVER} == set(product(FACTORS[a], FACTORS[b]))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Oracle]]:
    made = {}
    for name in ARCHITECTURES:
        path = tiny_checkpoint(name, tmp_path_factory.mktemp(name))
        made[name] = (path, Oracle(path))
    return made


def prompts() -> list[list[int]]:
    """32 prompts of 1 to 70 tokens; half share 35 tokens, two are the same."""
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 320, 35).tolist()
    made = [(shared if i % 2 else []) + rng.integers(3, 320, n).tolist() for i, n in enumerate(rng.integers(1, 36, 31))]
    return [*made, made[1]]


@pytest.mark.parametrize(
    ("architecture", "page", "chunk", "overlap", "cache", "tp"), COVER, ids=lambda v: str(v).lower()
)
def test_promise_8_greedy_tokens_are_transformers(
    architecture: str,
    page: int,
    chunk: int,
    overlap: bool,
    cache: str,
    tp: int,
    checkpoints: dict[str, tuple[Path, Oracle]],
) -> None:
    path, oracle = checkpoints[architecture]
    words = (
        f"page_size={page} max_prefill_tokens={chunk} overlap={overlap} cache={cache} tp={tp} num_pages={8192 // page}"
    )
    with LLM(str(path), overrides=["device=cpu", "max_running_requests=40", *words.split()]) as llm:
        asked = prompts()
        alone = [llm.generate([asked[i]], GREEDY)[0].token_ids for i in (0, 1, 31)]
        together = [output.token_ids for output in llm.generate(asked, GREEDY)]
        stats = llm.scheduler.stats()
        llm.scheduler.check_idle()
    oracle.check_all([*asked, *(asked[i] for i in (0, 1, 31))], together + alone)
    # The run was what its name says.
    assert (stats["cached_tokens"] > 0) == (cache == "radix")
    assert stats["retractions"] == 0
    assert all(len(output) == 12 for output in together)


def test_promise_8_holds_over_retractions(checkpoints: dict[str, tuple[Path, Oracle]]) -> None:
    """A pool too small for all: the youngest lose their pages and go on where they were."""
    path, oracle = checkpoints["qwen3"]
    asked = prompts()[:12]
    long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with LLM(str(path), overrides=["device=cpu", "page_size=4", "num_pages=50"]) as llm:
        outputs = llm.generate(asked, long)
        assert llm.scheduler.stats()["retractions"] > 0
        llm.scheduler.check_idle()
    assert all(len(output.token_ids) == 60 for output in outputs)
    oracle.check_all(asked, [output.token_ids for output in outputs])


def test_promise_8_oracle_finds_a_wrong_token(checkpoints: dict[str, tuple[Path, Oracle]]) -> None:
    path, oracle = checkpoints["llama"]
    with LLM(str(path), overrides=["device=cpu"]) as llm:
        output = llm.generate([[5, 6, 7]], GREEDY)[0].token_ids
    oracle.check([5, 6, 7], output)
    wrong = [*output[:6], (output[6] + 1) % 320, *output[7:]]
    with pytest.raises(AssertionError, match="output token 6 is"):
        oracle.check([5, 6, 7], wrong)
