"""`cache=groups` on models with windows: greedy tokens are those of transformers, and the options that can't serve.

The prompts are longer than the windows (9 and 21 positions) and than the chunks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl import LLM, SamplingParams
from minisgl.config import ConfigError
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.oracle import Oracle

pytestmark = pytest.mark.xdist_group("test_kv_groups")  # one process: the checkpoints are made once

MODELS: dict[str, dict[str, Any]] = {"gemma3": {}, "gpt_oss": {}, "olmo3": {}, "mistral": {"sliding_window": 21}}
OPTIONS = ["cache=groups", "attention=torch", "kernels=torch", "device=cpu", "max_seq_len=160", "max_prefill_tokens=48"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
random = np.random.default_rng(1)
PROMPTS = [random.integers(2, 320, n).tolist() for n in (5, 17, 70, 120, 33, 64)]
PROMPTS += [[*PROMPTS[3][:90], 7, 8, 9], [*PROMPTS[3], 5]]
NUM_PAGES = {(3, 1): 420, (3, 16): 40, (2, 1): 330, (2, 16): 30, (1, 1): 130, (1, 16): 13}
"""Pages, by number of groups and page size: so few that some of the eight requests are retracted."""
NUM_GROUPS = {"gemma3": 3, "gpt_oss": 2, "olmo3": 3, "mistral": 1}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Oracle]]:
    made = {}
    for name, overrides in MODELS.items():
        path = tiny_checkpoint(name, tmp_path_factory.mktemp(name), **overrides)
        made[name] = (path, Oracle(path))
    return made


@pytest.mark.parametrize(
    ("name", "page_size", "tp"),
    [
        ("gemma3", 1, 1),
        ("gemma3", 16, 2),
        ("gpt_oss", 16, 1),
        ("gpt_oss", 1, 2),
        ("olmo3", 1, 1),
        ("olmo3", 16, 2),
        ("mistral", 16, 1),
        ("mistral", 1, 2),
    ],
)
def test_promise_8_greedy_tokens_with_groups(
    name: str, page_size: int, tp: int, checkpoints: dict[str, tuple[Path, Oracle]]
) -> None:
    """Cold and warm cache, alone and eight at a time, with requests that are retracted."""
    path, oracle = checkpoints[name]
    sizes = [f"page_size={page_size}", f"num_pages={NUM_PAGES[NUM_GROUPS[name], page_size]}", f"tp={tp}"]
    with LLM(str(path), overrides=[*OPTIONS, *sizes]) as llm:
        assert len(llm.engine.spec.groups) == NUM_GROUPS[name]
        assert any(group.window > 0 for group in llm.engine.spec.groups)
        prompts = [PROMPTS[3], PROMPTS[3], *PROMPTS, *PROMPTS]
        outputs = [llm.generate([prompt], GREEDY)[0] for prompt in prompts[:2]]
        assert outputs[1].cached_tokens >= 112  # the pages behind the windows were evictable, but not evicted
        outputs += llm.generate(PROMPTS, GREEDY)
        llm.scheduler.cache_manager.reserve.mean_length = 0.0  # admit more than fit to their end
        outputs += llm.generate(PROMPTS, GREEDY)
        stats = llm.scheduler.stats()
    oracle.check_all(prompts, [list(output.token_ids) for output in outputs])
    # With pages of one token, Mistral's promises let so few requests run that they grow to their ends.
    assert stats["retractions"] > 0 or (name, page_size) == ("mistral", 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["attention=paged"], "the attention backend reads pages behind a window"),
        (["graph=simulated"], "graphs record one page table"),
        (["speculation=ngram"], "allocates no pages for drafts"),
    ],
)
def test_options_that_know_one_group(
    options: list[str], message: str, checkpoints: dict[str, tuple[Path, Oracle]]
) -> None:
    with pytest.raises(ConfigError, match=message), LLM(str(checkpoints["olmo3"][0]), overrides=[*OPTIONS, *options]):
        pass


def test_model_that_calls_the_parts_of_attention() -> None:
    """``architecture=Qwen3Plain`` calls `norm_rope_store` and `forward` itself."""
    tokens = []
    for cache in ("radix", "groups"):
        with LLM("tutor", overrides=["architecture=Qwen3Plain", f"cache={cache}", "num_pages=64"]) as llm:
            tokens.append([list(output.token_ids) for output in llm.generate(["What is a page?"] * 2, GREEDY)])
    assert tokens[0] == tokens[1]
