"""Promise 8 through the whole server: greedy tokens over HTTP equal those of transformers, alone and 32 at a time.

Each of the four requests at a time has eight prompts, so that steps have several rows however slowly the clients send.

tests/engine/test_greedy_oracle.py tests every architecture and every pair of options in one process. A server adds
nothing to an architecture, so this test covers each value of each option with the embedded models and others.
"""

from __future__ import annotations

import concurrent.futures
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from minisgl.models.resolve import resolve_model
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.oracle import Oracle
from minisgl.testing.serving import Server

# model, page_size, max_prefill_tokens, overlap, cache, tp
COVER = [
    ("tutor", 16, 8192, True, "radix", 2),
    ("mistral", 16, 16, False, "radix", 1),
    ("qwen3_moe", 1, 16, True, "naive", 1),
    pytest.param("smollm3", 16, 16, True, "radix", 1, marks=pytest.mark.thorough),
    pytest.param("olmo3", 1, 16, False, "radix", 2, marks=pytest.mark.thorough),
    pytest.param("gemma3", 16, 16, True, "radix", 1, marks=pytest.mark.thorough),
    pytest.param("gpt_oss", 1, 16, True, "radix", 2, marks=pytest.mark.thorough),
    pytest.param("qwen3_next", 1, 16, False, "states cache.spacing=16", 1, marks=pytest.mark.thorough),
    ("tutor-hybrid", 16, 16, True, "states cache.spacing=16", 2),  # a Qwen3.5
]


def prompts(vocabulary: int) -> list[list[int]]:
    """Return 32 random prompts of 1 to 70 tokens. Half of them begin with the same 35 tokens."""
    rng = np.random.default_rng(1)
    shared = rng.integers(4, vocabulary, 35).tolist()
    lengths = rng.integers(1, 36, 32)
    return [(shared if i % 2 else []) + rng.integers(4, vocabulary, n).tolist() for i, n in enumerate(lengths)]


@pytest.mark.parametrize(("model", "page", "chunk", "overlap", "cache", "tp"), COVER)
def test_promise_8_greedy_tokens_match_transformers(
    model: str, page: int, chunk: int, overlap: bool, cache: str, tp: int, tmp_path: Path
) -> None:
    window: dict[str, Any] = {"sliding_window": 21} if model == "mistral" else {}  # most prompts are longer
    path = resolve_model(model) if model.startswith("tutor") else tiny_checkpoint(model, tmp_path, **window)
    words = f"page_size={page} max_prefill_tokens={chunk} overlap={overlap} cache={cache} tp={tp}"
    prompt_ids = prompts(2048 if model.startswith("tutor") else 320)
    with (
        Server(f"model={path}", *words.split(), f"num_pages={8192 // page}", "max_running_requests=40") as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
        concurrent.futures.ThreadPoolExecutor(4) as pool,
    ):

        def ask(prompts: list[list[int]]) -> list[list[int]]:
            body = {"prompt": prompts, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            answer = http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
            assert [len(choice["token_ids"]) for choice in choices] == [12] * len(prompts)
            return [choice["token_ids"] for choice in choices]

        alone = [tokens for i in (0, 1, 3) for tokens in ask([prompt_ids[i]])]
        groups = [prompt_ids[i : i + 8] for i in range(0, len(prompt_ids), 8)]
        together = [tokens for answered in pool.map(ask, groups) for tokens in answered]
        metrics = server.metrics()
        assert server.wait_until_idle()
    Oracle(path).check_all([*prompt_ids, *(prompt_ids[i] for i in (0, 1, 3))], together + alone)
    assert (metrics["minisgl_scheduler_cached_tokens_total"] > 0) == (cache != "naive")
    assert metrics["minisgl_step_rows_sum"] > metrics["minisgl_step_rows_count"] * 2  # the requests were batched
