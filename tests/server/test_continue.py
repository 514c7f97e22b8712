"""``continue_final_message`` over HTTP: the answer goes on with a message, also within a grammar."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from minisgl.testing.serving import Server

pytestmark = pytest.mark.xdist_group("test_continue")
USER: dict[str, Any] = {"role": "user", "content": "What is a KV cache?"}
SCHEMA = {
    "type": "object",
    "properties": {"term": {"enum": ["page", "prefix"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["term", "count"],
}
JSON: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def ask(server: Server, begun: Any, **fields: Any) -> httpx.Response:
    messages = [USER, {"role": "assistant", "content": begun}]
    body = {"messages": messages, "temperature": 0, "add_generation_prompt": False, "continue_final_message": True}
    return httpx.post(f"{server.url}/v1/chat/completions", json={**body, "max_tokens": 100, **fields}, timeout=60)


def content(response: httpx.Response) -> str:
    answer = response.json()
    assert answer["choices"][0]["finish_reason"] == "stop", answer
    return str(answer["choices"][0]["message"]["content"])


def test_the_answer_goes_on(tutor: Server, client: openai.OpenAI) -> None:
    """The rest of a greedy answer follows its beginning, and the prompt has the tokens that ``/tokenize`` says."""
    whole = content(httpx.post(f"{tutor.url}/v1/chat/completions", json={"messages": [USER], "temperature": 0}))
    cut = whole.index(" ", len(whole) // 2)
    answer = ask(tutor, whole[:cut])
    assert whole[:cut] + content(answer) == whole
    messages = [USER, {"role": "assistant", "content": whole[:cut]}]
    tokenized = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    count = httpx.post(f"{tutor.url}/tokenize", json=tokenized).json()["count"]
    assert answer.json()["usage"]["prompt_tokens"] == count
    parts = ask(tutor, [{"type": "text", "text": whole[:cut]}])
    assert content(parts) == content(answer)


@pytest.mark.parametrize("begun", ["{", '{"ter', '{"term": "p', '{"term": "prefix", "count": 7', '{"term": "page", '])
def test_a_grammar_is_that_of_the_whole_message(tutor: Server, begun: str) -> None:
    """The beginning may end within a token of the answer alone, such as ``"term``."""
    for temperature in (0.0, 1.5):
        value = json.loads(begun + content(ask(tutor, begun, response_format=JSON, temperature=temperature, seed=3)))
        assert list(value) == ["term", "count"]
        assert value["term"] in ("page", "prefix")
        assert 0 <= value["count"] <= 99
    choice = content(ask(tutor, "ye", structured_outputs={"choice": ["yes please", "yellow", "no"]}))
    assert "ye" + choice in ("yes please", "yellow")


def test_a_whole_message_has_an_empty_answer(tutor: Server) -> None:
    assert content(ask(tutor, '{"term": "page", "count": 12}', response_format=JSON)) == ""


@pytest.mark.parametrize(
    ("begun", "fields", "param"),
    [
        ('{"other"', {"response_format": JSON}, "messages"),
        ("no JSON", {"response_format": {"type": "json_object"}}, "messages"),
        ("x", {"add_generation_prompt": True}, "add_generation_prompt"),
        ("", {}, "messages"),
        (None, {}, "messages"),
    ],
)
def test_refused(tutor: Server, begun: Any, fields: dict[str, Any], param: str) -> None:
    answer = ask(tutor, begun, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_no_plain_prompt_has_it(tutor: Server) -> None:
    body = {"prompt": "x", "continue_final_message": True}
    answer = httpx.post(f"{tutor.url}/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "continue_final_message")
