"""``echo``: the prompt's text and log-probabilities come before the output, as lm-eval's loglikelihood needs them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.serving import Server

pytestmark = pytest.mark.xdist_group("test_echo")  # one process: the server starts once
PLAIN = "/v1/completions"


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3", tmp_path_factory.mktemp("tiny"), tokenizer=True)


@pytest.fixture(scope="module")
def http(tiny_path: Path) -> Iterator[httpx.Client]:
    words = ("num_pages=256", "max_prefill_tokens=32", "server.served_model_name=tiny", "generation_config=none")
    with Server(f"model={tiny_path}", *words) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post(PLAIN, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@torch.inference_mode()
def reference(path: Path, prompt: list[int]) -> tuple[list[float], list[bool]]:
    """Return transformers' log-probability of each token but the first, and whether it is the most likely one."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    scores = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    chosen = torch.tensor(prompt[1:])
    return scores.gather(1, chosen[:, None])[:, 0].tolist(), (scores.argmax(-1) == chosen).tolist()


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_loglikelihood_equals_transformers(http: httpx.Client, tiny_path: Path, max_tokens: int) -> None:
    """The request of lm-eval's loglikelihood, read as lm-eval reads it, on prompts with a common beginning."""
    rng = np.random.default_rng(3)
    begin = rng.integers(4, 320, 40).tolist()
    prompts = [begin + rng.integers(4, 320, n).tolist() for n in (1, 20, 33)] + [[5, 6]]
    answer = complete(
        http, prompt=prompts, max_tokens=max_tokens, logprobs=1, echo=True, temperature=0, seed=1234, model="tiny"
    )
    assert answer["usage"]["completion_tokens"] == max_tokens * len(prompts)
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        logprobs = choice["logprobs"]
        assert {len(each) for each in logprobs.values()} == {len(prompt) + max_tokens}
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        values, greedy = reference(tiny_path, prompt)
        np.testing.assert_allclose(logprobs["token_logprobs"][1 : len(prompt)], values, atol=1e-3)
        tops = logprobs["top_logprobs"][1 : len(prompt)]
        own = logprobs["token_logprobs"][1 : len(prompt)]
        found = [value == max(top.values()) for value, top in zip(own, tops, strict=True)]
        assert found == greedy
        assert choice["finish_reason"] == "length"


def test_end_of_sequence_has_an_entry(http: httpx.Client) -> None:
    """lm-eval drops the last entry, that of the sampled token: it is there also if the token ends the answer."""
    bias = {"1": 100}  # an end-of-sequence id of tiny checkpoints
    answer = complete(http, prompt=[5, 6, 7], max_tokens=1, logprobs=1, echo=True, logit_bias=bias)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 4


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("max_tokens", [0, 4])
def test_text(http: httpx.Client, max_tokens: int, logprobs: int | None) -> None:
    """The text is the prompt and the output, and the offsets of the tokens are places in it."""
    fields = {"temperature": 0, "ignore_eos": True, "n": 2, "return_token_ids": True}
    prompt = "Größe: 12 < 30"
    plain = complete(http, prompt=prompt, max_tokens=max(max_tokens, 1), **fields)["choices"][0]
    ids = http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
    for given in (prompt, ids):
        body = {"prompt": given, "max_tokens": max_tokens, "echo": True, "logprobs": logprobs, **fields}
        answer = complete(http, **body)
        for choice in answer["choices"]:
            assert choice["text"].endswith(prompt + (plain["text"] if max_tokens else ""))
            assert choice["token_ids"] == (plain["token_ids"] if max_tokens else [])
            if logprobs is None:
                assert choice["logprobs"] is None
                continue
            assert len(choice["logprobs"]["tokens"]) == len(ids) + max_tokens
            assert choice["logprobs"]["text_offset"][1] == len(choice["logprobs"]["tokens"][0])
            assert all(2 <= len(top) <= 3 for top in choice["logprobs"]["top_logprobs"][1:])
        assert answer["usage"]["prompt_tokens"] == len(ids)
        assert answer["usage"]["completion_tokens"] == 2 * max_tokens


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_stream(http: httpx.Client, max_tokens: int) -> None:
    body = {"prompt": ["Hi you", "Ho"], "max_tokens": max_tokens, "echo": True, "temperature": 0, "ignore_eos": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    full = complete(http, **body)
    text = http.post(PLAIN, json={**body, "stream": True, "stream_options": options}).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    for choice in full["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == full["usage"]["completion_tokens"] == 2 * max_tokens
