"""Whether and how much to think: the words of three APIs reach a template that reads them, or are counted as hints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from minisgl.models.resolve import resolve_model
from minisgl.testing.serving import Server

pytestmark = pytest.mark.xdist_group("test_thinking")  # one process: the server starts once
TEMPLATE = """{%- if reasoning_effort is defined %}{{- '<|im_start|>system\n' + reasoning_effort + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}{{- message.content }}{{- '<|im_end|>\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking %}{{- '<think>\n' }}
{%- elif enable_thinking is defined %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"""
USER: list[Any] = [{"role": "user", "content": "What is a KV cache?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(resolve_model("tutor"), path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    with Server(f"model={path}", "server.served_model_name=m", "num_pages=512") as running:
        yield running


def chat(server: Server, **fields: Any) -> dict[str, Any]:
    body = {"messages": USER, "max_tokens": 30, "temperature": 0, "ignore_eos": True, **fields}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_reasoning_tokens_of_a_chat(server: Server) -> None:
    """The prompt opens the reasoning, and the model does not end it: all tokens are reasoning, streamed or not."""
    thought = chat(server, enable_thinking=True)
    assert thought["choices"][0]["message"]["reasoning"]
    assert thought["usage"]["completion_tokens_details"] == {"reasoning_tokens": 30}
    for fields in ({}, {"enable_thinking": False}, {"reasoning_effort": "none"}):
        said = chat(server, **fields)
        assert said["choices"][0]["message"]["content"]
        assert said["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    body = {"messages": USER, "max_tokens": 30, "ignore_eos": True, "enable_thinking": True, "n": 2, "stream": True}
    options = {"stream_options": {"include_usage": True}}
    lines = httpx.post(f"{server.url}/v1/chat/completions", json={**body, **options}, timeout=60).text.split("\n\n")
    usage = json.loads(lines[-3].removeprefix("data: "))["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 60}


def test_other_apis_say_it_in_their_words(server: Server) -> None:
    """The prompts have as many tokens as those of chats with the same variables."""
    tokens = {
        name: chat(server, **fields)["usage"]["prompt_tokens"]
        for name, fields in {
            "plain": {}, "think": {"enable_thinking": True}, "no": {"enable_thinking": False},
            "high": {"reasoning_effort": "high"}, "none": {"reasoning_effort": "none"},
        }.items()
    }  # fmt: skip
    assert len(set(tokens.values())) == len(tokens)

    def count(**fields: Any) -> int:
        body = {"model": "m", "messages": USER, **fields}
        return int(httpx.post(f"{server.url}/v1/messages/count_tokens", json=body, timeout=60).json()["input_tokens"])

    def respond(**fields: Any) -> int:
        body = {"model": "m", "input": USER[0]["content"], "max_output_tokens": 1, **fields}
        return int(httpx.post(f"{server.url}/v1/responses", json=body, timeout=60).json()["usage"]["input_tokens"])

    assert count() == count(thinking={"type": "adaptive"}) == respond() == tokens["plain"]
    assert count(thinking={"type": "enabled", "budget_tokens": 1024}) == tokens["think"]
    assert count(thinking={"type": "disabled"}) == tokens["no"]
    assert count(output_config={"effort": "high"}) == respond(reasoning={"effort": "high"}) == tokens["high"]
    assert respond(reasoning={"effort": "none"}) == tokens["none"]


def test_hints_are_counted(tutor: Server, server: Server) -> None:
    """A template that does not read the variables makes hints of them."""

    def counts(running: Server) -> dict[str, float]:
        return {
            name: value for name, value in running.metrics().items() if name.startswith("minisgl_hint_parameters_t")
        }

    for running, name in ((tutor, "tutor"), (server, "m")):
        before = counts(running)
        chat(running, reasoning_effort="low", max_tokens=1)
        message = {"model": name, "messages": USER, "max_tokens": 1, "metadata": {"user_id": "x"}}
        thinking = {"type": "enabled", "budget_tokens": 1024}
        httpx.post(f"{running.url}/v1/messages", json={**message, "thinking": thinking}, timeout=60).raise_for_status()
        response = {"model": name, "input": "Hi", "max_output_tokens": 16, "text": {"verbosity": "low"}, "user": "x"}
        effort = {"reasoning": {"effort": "high", "summary": "auto"}}
        httpx.post(f"{running.url}/v1/responses", json={**response, **effort}, timeout=60).raise_for_status()
        after = counts(running)
        found = {key.split('"')[1]: value - before.get(key, 0) for key, value in after.items()}
        own = {"reasoning_effort": 2, "enable_thinking": 1} if running is tutor else {}
        always = ("metadata", "thinking.budget_tokens", "text.verbosity", "user", "reasoning.summary")
        assert {key: value for key, value in found.items() if value} == {**own, **dict.fromkeys(always, 1)}


def test_a_name_is_a_hint(tutor: Server) -> None:
    """The template of ``tutor`` does not write names: the answer is the same without."""
    named = chat(tutor, messages=[{**USER[0], "name": "Ada"}])
    assert named["choices"] == chat(tutor)["choices"]
