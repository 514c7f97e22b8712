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

from minisgl.testing.serving import Server

from .catalog import FOLDER

pytestmark = pytest.mark.xdist_group("clients")
PAYLOADS = [
    pytest.param(payload, id=f"{file.stem}-{number}")
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
        check_message(body, text, reasons[0])
        return
    answer = ChatCompletion.model_validate_json(response.text, strict=True)
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    choice = answer.choices[0]
    check_message(body, choice.message.content or "", choice.finish_reason)


def check_message(body: dict[str, Any], text: str, reason: str) -> None:
    """Check the text of a message against the form that the request asks for."""
    format_ = body.get("response_format") or {"type": "text"}
    if reason == "length":
        assert text
    elif format_["type"] == "json_schema":
        jsonschema.validate(json.loads(text), format_["json_schema"]["schema"])
    elif format_["type"] == "json_object":
        assert isinstance(json.loads(text), dict)
    else:
        assert reason == "stop" and text


CHECKS: dict[str, Callable[[dict[str, Any], httpx.Response], None]] = {"/v1/chat/completions": check_chat}
"""Path → the check of an answer."""


@pytest.mark.parametrize("payload", PAYLOADS)
def test_payload(payload: dict[str, Any], server: Server) -> None:
    url = f"{server.url}{payload['path']}"
    response = httpx.post(url, json=payload["body"], headers=payload["headers"], timeout=120)
    assert response.status_code == 200, response.text
    CHECKS[payload["path"]](payload["body"], response)
