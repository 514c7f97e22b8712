"""The requests that real clients sent, sent again without the clients: every answer has the form of its API.

`make check-clients` keeps the requests in ``payloads/``. Here they run in every check, without anything to install.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from minisgl.testing.serving import Server

from .catalog import FOLDER

pytestmark = pytest.mark.xdist_group("clients")
PENDING: dict[str, str] = {}
"""Request → why it is refused today."""


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.xfail(reason=PENDING[name], strict=True)] if name in PENDING else []


PAYLOADS = [
    pytest.param(payload, id=f"{file.stem}-{number}", marks=marks(f"{file.stem}-{number}"))
    for file in sorted((FOLDER / "payloads").glob("*.json"))
    for number, payload in enumerate(json.loads(file.read_text("utf-8")))
]


def events(response: httpx.Response) -> Iterator[str]:
    """Yield the data of each event of a stream."""
    assert response.headers["content-type"].startswith("text/event-stream")
    for line in response.text.splitlines():
        if line.startswith("data:"):
            yield line.removeprefix("data:").strip()


def check_chat(body: dict[str, Any], response: httpx.Response) -> None:
    if body.get("stream"):
        *data, last = events(response)
        assert last == "[DONE]"
        chunks = [ChatCompletionChunk.model_validate_json(each, strict=True) for each in data]
        used = [chunk.usage for chunk in chunks if chunk.usage is not None]
        options = body.get("stream_options") or {}
        if not options.get("continuous_usage_stats"):
            assert len(used) == bool(options.get("include_usage"))
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert choices[0].delta.role == "assistant"
        reasons = [choice.finish_reason for choice in choices if choice.finish_reason]
        text = "".join(choice.delta.content or "" for choice in choices)
        assert len(reasons) == 1
        calls: list[list[str]] = []
        for delta in (delta for choice in choices for delta in choice.delta.tool_calls or []):
            if delta.function and delta.function.name:
                assert delta.index == len(calls) and delta.id
                calls.append([delta.function.name, ""])
            calls[delta.index][1] += (delta.function and delta.function.arguments) or ""
        check_message(body, text, calls, reasons[0])
        return
    answer = ChatCompletion.model_validate_json(response.text, strict=True)
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    choice = answer.choices[0]
    calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or []]  # type: ignore[union-attr]
    check_message(body, choice.message.content or "", calls, choice.finish_reason)


def check_message(body: dict[str, Any], text: str, calls: list[list[str]], reason: str) -> None:
    """Check the text and the tool calls of a message against the form that the request asks for."""
    format_ = body.get("response_format") or {"type": "text"}
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in body.get("tools", [])}
    forced = body.get("tool_choice", "auto") not in ("auto", "none")
    check_calls(schemas, calls, forced, cut=reason == "length")
    if forced or calls:
        assert reason in ("tool_calls", "length", "stop")
    elif body.get("tools"):  # the model knows one tool, a calculator: beside others it may end at once
        assert reason in ("stop", "length")
    elif reason == "length":
        assert text
    elif format_["type"] == "json_schema":
        jsonschema.validate(json.loads(text), format_["json_schema"]["schema"])
    elif format_["type"] == "json_object":
        assert isinstance(json.loads(text), dict)
    else:
        assert reason == "stop" and text


def check_calls(schemas: dict[str, Any], calls: list[list[str]], forced: bool, cut: bool) -> None:
    """Check names and arguments of tool calls; the last one is not complete if the answer was cut."""
    assert calls or not forced
    for name, arguments in calls[: len(calls) - cut]:
        jsonschema.validate(json.loads(arguments), schemas[name])


def check_completion(body: dict[str, Any], response: httpx.Response) -> None:
    choices = response.json()["choices"]  # the first score is null, which the types of the package openai don't know
    for choice, prompt in zip(choices, body["prompt"], strict=True):
        assert choice["text"]
        if body.get("echo"):
            first, *scores = choice["logprobs"]["token_logprobs"]
            assert first is None and all(score <= 0 for score in scores)
            assert len(scores) == len(prompt) + body["max_tokens"] - 1


def check_response(body: dict[str, Any], response: httpx.Response) -> None:
    """Check an answer of the Responses API: its types are those of the package openai, also of each event."""
    text = response.text
    if body.get("stream"):
        found = [json.loads(each) for each in events(response)]
        for event in found:
            TypeAdapter(ResponseStreamEvent).validate_python(event)
        assert [event["sequence_number"] for event in found] == list(range(len(found)))
        assert found[0]["type"] == "response.created"
        assert found[-1]["type"] in ("response.completed", "response.incomplete")
        text = json.dumps(found[-1]["response"])
    answer = Response.model_validate_json(text)
    assert answer.status in ("completed", "incomplete") and answer.usage is not None
    calls = [[item.name, item.arguments] for item in answer.output if item.type == "function_call"]
    tools = {tool["name"]: tool["parameters"] for tool in body.get("tools", []) if tool["type"] == "function"}
    forced = body.get("tool_choice", "auto") not in ("auto", "none")
    check_calls(tools, calls, forced, cut=answer.status == "incomplete")
    format_ = (body.get("text") or {}).get("format") or {"type": "text"}
    if format_["type"] == "json_schema" and not calls and answer.status == "completed":
        jsonschema.validate(json.loads(answer.output_text), format_["schema"])


def check_messages(body: dict[str, Any], response: httpx.Response) -> None:
    """Check a message of Anthropic's API. In a stream, blocks begin, grow and end one after the other."""
    if not body.get("stream"):
        answer = response.json()
        schemas = {tool["name"]: tool["input_schema"] for tool in body.get("tools", [])}
        calls = [[b["name"], json.dumps(b["input"])] for b in answer["content"] if b["type"] == "tool_use"]
        forced = body.get("tool_choice", {"type": "auto"})["type"] in ("any", "tool")
        check_calls(schemas, calls, forced, cut=answer["stop_reason"] == "max_tokens")
        assert answer["usage"]["output_tokens"] > 0
        return
    found = [json.loads(each) for each in events(response)]
    kinds = [event["type"] for event in found if event["type"] != "ping"]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    open_block = None
    for event in found:
        if event["type"] == "content_block_start":
            assert open_block is None
            open_block = event["index"]
        elif event["type"] in ("content_block_delta", "content_block_stop"):
            assert event["index"] == open_block
            open_block = None if event["type"] == "content_block_stop" else open_block
    assert open_block is None
    assert found[-2]["delta"]["stop_reason"] in ("end_turn", "max_tokens", "tool_use")
    assert found[-2]["usage"]["output_tokens"] > 0


def check_count(body: dict[str, Any], response: httpx.Response) -> None:
    assert response.json()["input_tokens"] > 0


CHECKS: dict[str, Callable[[dict[str, Any], httpx.Response], None]] = {
    "/v1/chat/completions": check_chat,
    "/v1/completions": check_completion,
    "/v1/responses": check_response,
    "/v1/messages": check_messages,
    "/v1/messages?beta=true": check_messages,
    "/v1/messages/count_tokens": check_count,
}
"""Path → the check of an answer."""


@pytest.mark.parametrize("payload", PAYLOADS)
def test_payload(payload: dict[str, Any], server: Server) -> None:
    url = f"{server.url}{payload['path']}"
    response = httpx.post(url, json=payload["body"], headers=payload["headers"], timeout=120)
    assert response.status_code == 200, response.text
    CHECKS[payload["path"]](payload["body"], response)
