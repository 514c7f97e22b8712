"""The parameters of the model's generation_config.json apply to requests that leave them out, on every route."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from minisgl import LLM, SamplingParams
from minisgl.config import Config, ConfigError
from minisgl.models.generation_config import default_sampling_params
from minisgl.plugin_manager.manager import PluginManager
from minisgl.server.serve import serve
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.serving import Server

from .conftest import AppServer

DEFAULTS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05}
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
PLAIN = ("/v1/completions", {"prompt": "x"})


def submitted(run_app: Callable[..., None], defaults: dict[str, Any], path: str, body: dict[str, Any]) -> Any:
    found = []

    async def send(server: AppServer) -> None:
        async with server.client() as http:
            assert (await http.post(path, json=body)).status_code == 200
        found.append(server.submitted[0])

    run_app(send, defaults=defaults)
    return found[0]


@pytest.mark.parametrize(("path", "body"), [CHAT, PLAIN])
def test_defaults_and_values_of_a_request(run_app: Callable[..., None], path: str, body: dict[str, Any]) -> None:
    def params(**given: Any) -> SamplingParams:
        found = submitted(run_app, DEFAULTS, path, {**body, "max_tokens": 5, **given}).params
        assert isinstance(found, SamplingParams)
        return found

    assert params() == SamplingParams(max_tokens=5, **DEFAULTS)
    assert params(temperature=None) == params()
    # A value that equals the neutral one is a value, too.
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert params(**neutral) == SamplingParams(max_tokens=5)
    assert params(temperature=0) == SamplingParams(max_tokens=5, **{**DEFAULTS, "temperature": 0.0})


@pytest.mark.parametrize(
    ("route", "default", "given", "expected"),
    [
        (CHAT, None, None, AppServer.SPEC.max_seq_len), (CHAT, 30, None, 30), (CHAT, 30, 40, 40), (CHAT, 30, 3, 3),
        (PLAIN, None, None, 16), (PLAIN, 30, None, 16), (PLAIN, 9, None, 9), (PLAIN, 9, 12, 12),
    ],
)  # fmt: skip
def test_max_new_tokens(
    run_app: Callable[..., None], route: tuple[str, dict[str, Any]], default: Any, given: Any, expected: int
) -> None:
    """It limits an answer whose request sets no limit."""
    defaults = {} if default is None else {"max_tokens": default}
    message = submitted(run_app, defaults, route[0], {**route[1], "max_tokens": given})
    assert message.params.max_tokens == expected
    assert message.max_tokens_from_context == (route == CHAT and given is None)


def checkpoint(folder: Path) -> Path:
    """Write a model whose end-of-sequence token only its tokenizer names, and which recommends top_k=1."""
    generation = {"eos_token_id": [], "top_k": 1}
    path = tiny_checkpoint("llama", folder, tokenizer=True, eos_token_id=None, generation=generation)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "<|end|>"}))
    return path


def test_a_server_and_an_llm(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model")
    end = {"logit_bias": {"2": 100}, "max_tokens": 5, "prompt": [50, 60], "return_token_ids": True}
    with LLM(str(path), overrides=["num_pages=64", "log_level=error"]) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(top_k=1)
        want = llm.generate([[50, 60]], SamplingParams(temperature=0.0, max_tokens=16))[0].token_ids
        assert llm.generate([[50, 60]])[0].token_ids == want
        assert llm.generate([[50, 60]], SamplingParams(logit_bias={2: 100.0}))[0].finish_reason == "stop"
    with Server(f"model={path}", "num_pages=64") as server, httpx.Client(base_url=server.url, timeout=60) as http:

        def ask(**body: Any) -> Any:
            return http.post("/v1/completions", json=body).json()

        choice = ask(prompt=[50, 60], return_token_ids=True)["choices"][0]
        assert choice["token_ids"] == want
        choice = ask(**end)["choices"][0]
        assert (choice["finish_reason"], choice["token_ids"], choice["text"]) == ("stop", [2], "")
        choice = ask(**{**end, "ignore_eos": True, "stop": "<|end|>"})["choices"][0]
        assert (choice["finish_reason"], choice["token_ids"], choice["text"]) == ("stop", [2], "")
        error = ask(**{**end, "stop": "<|end|>\n"})["error"]
        assert (error["param"], "skip_special_tokens" in error["message"]) == ("stop", True)
        assert http.get("/model_info").json()["default_sampling_params"] == {"top_k": 1}


def test_generation_config_none(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model")
    with LLM(str(path), overrides=["num_pages=64", "log_level=error", "generation_config=none"]) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    assert default_sampling_params(Config(model=str(path), generation_config="none"), path) == {}
    with pytest.raises(ConfigError, match="generation_config=vllm"):
        Config(generation_config="vllm").check()


def test_a_wrong_value_stops_the_start(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path, generation={"top_p": 7})
    with pytest.raises(ConfigError, match=r"generation_config\.json: top_p=7"):
        LLM(str(path))
    with pytest.raises(ConfigError, match=r"generation_config\.json: top_p=7"):
        serve(Config(model=str(path)), PluginManager.load())
