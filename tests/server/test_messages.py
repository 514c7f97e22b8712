"""``POST /v1/messages`` and ``count_tokens``: full and streamed, Anthropic's errors, refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from minisgl.testing.serving import Server

pytestmark = pytest.mark.xdist_group("test_messages")  # one process: the server starts once
ASK = {"role": "user", "content": "What is a page?"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("device=cpu", "model=tutor", "num_pages=512", "server.api_key=secret") as running:
        yield running


def post(server: Server, path: str = "/v1/messages", **fields: Any) -> httpx.Response:
    body = {"model": "tutor", "max_tokens": 100, "temperature": 0, "messages": [ASK], **fields}
    if path.endswith("count_tokens"):
        del body["max_tokens"], body["temperature"]
    headers = {"x-api-key": "secret", "anthropic-version": "2023-06-01", "anthropic-beta": "x-2026-01-01"}
    return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=120)


def chat(server: Server, messages: list[Any], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "temperature": 0, "max_tokens": 100, **fields}
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", json=body, headers={"authorization": "Bearer secret"}, timeout=120
    )
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, whose names are their types."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for event in answer.text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_text_equals_a_chat(server: Server) -> None:
    said = chat(server, [ASK])
    answer = post(server)
    assert answer.status_code == 200
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    message = answer.json()
    assert message["content"] == [{"type": "text", "text": said["choices"][0]["message"]["content"]}]
    assert (message["type"], message["role"], message["stop_reason"]) == ("message", "assistant", "end_turn")
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == said["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == said["usage"]["completion_tokens"]


def test_system_and_blocks(server: Server) -> None:
    """Blocks become the texts of a chat, with marks for a cache; users' messages in a row are one."""
    mark = {"cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": "Be brief.", **mark}, {"type": "text", "text": "Be kind."}]
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Hello."}]},
        {"role": "user", "content": [{"type": "text", "text": ASK["content"], **mark}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A piece of memory."}]},
        {"role": "user", "content": "Why?"},
    ]
    said = chat(
        server,
        [
            {"role": "system", "content": "Be brief.\nBe kind."},
            {"role": "user", "content": f"Hello.\n{ASK['content']}"},
            {"role": "assistant", "content": "A piece of memory."},
            {"role": "user", "content": "Why?"},
        ],
    )
    answer = post(server, system=system, messages=turns).json()
    assert answer["content"][0]["text"] == said["choices"][0]["message"]["content"]
    counted = post(server, "/v1/messages/count_tokens", system=system, messages=turns).json()
    assert counted == {"input_tokens": said["usage"]["prompt_tokens"]}


def test_stream(server: Server) -> None:
    full = post(server, max_tokens=12).json()
    found = events(post(server, "/v1/messages?beta=true", max_tokens=12, stream=True))
    kinds = [event["type"] for event in found]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(event["delta"]["text"] for event in found[3:-3])
    assert [{"type": "text", "text": text}] == full["content"]
    assert found[0]["message"]["content"] == []
    assert found[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] == 12


def test_stop_sequence(server: Server) -> None:
    full = post(server, stop_sequences=["zzz", " is"]).json()
    assert (full["stop_reason"], full["stop_sequence"]) == ("stop_sequence", " is")
    found = events(post(server, stop_sequences=["zzz", " is"], stream=True))
    assert found[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": " is"}


def test_a_limit_above_the_context(server: Server) -> None:
    """``max_tokens`` may be above the context, and the answer then ends where the context does."""
    answer = post(server, max_tokens=10**6, chat_template_kwargs={}, stop_sequences=["."])
    assert answer.json()["stop_reason"] == "stop_sequence"


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type 'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type 'web_search_20250305'"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0]"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "x"}, "container"),
        ({"system": [{"type": "image"}]}, "system[0].type 'image'"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
    ],
)
def test_refused_by_name(server: Server, fields: dict[str, Any], word: str) -> None:
    for stream in (False, True):
        answer = post(server, stream=stream, **fields)
        assert answer.status_code == 400, answer.text
        error = answer.json()
        assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
        assert word in error["error"]["message"]
        assert answer.headers["request-id"]


def test_other_errors(server: Server) -> None:
    url, body = f"{server.url}/v1/messages", {"model": "tutor", "max_tokens": 5, "messages": [ASK]}
    for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong", "x-api-key": "secret"}):
        refused = httpx.post(url, json=body, headers=headers, timeout=60)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert httpx.post(url, json=body, headers={"authorization": "Bearer secret"}, timeout=60).status_code == 200
    unknown = post(server, model="claude-x")
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    long = post(server, messages=[{"role": "user", "content": "word " * 20_000}])
    assert long.status_code == 400
    assert long.json()["error"]["message"].startswith("prompt is too long")


def test_structured_output(server: Server) -> None:
    schema = {"type": "object", "properties": {"page": {"type": "boolean"}}, "required": ["page"]}
    answer = post(server, output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"}).json()
    assert isinstance(json.loads(answer["content"][0]["text"])["page"], bool)


def test_hints_are_accepted(server: Server) -> None:
    """What Claude Code sends besides the conversation."""
    hints = {
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": "{}"},
        "service_tier": "auto",
    }
    assert post(server, **hints).json()["content"] == post(server).json()["content"]
