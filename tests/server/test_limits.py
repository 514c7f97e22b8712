"""Limits of one request: sizes are checked before any work on a value, and errors repeat little of the request."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from starlette.requests import Request

from minisgl.plugins.http import MIN_BODY, HttpConfig
from minisgl.plugins.http.apis import completion
from minisgl.plugins.http.apis.completion import CompletionRequest
from minisgl.plugins.http.apis.parameters import FullChatRequest
from minisgl.plugins.http.body_size import counted
from minisgl.plugins.http.bounds import MAX_FIELD, MAX_PROMPTS, Bounds
from minisgl.plugins.http.tokenize import DetokenizeBody, TokenizeBody, check_tokens
from minisgl.server import parsing
from minisgl.server.app import SMALL_BODY, parse_body
from minisgl.server.errors import ApiError
from minisgl.testing.serving import Server

from .conftest import parse
from .test_errors import CHAT, PLAIN, USER, assert_serves, error_of

LONG = "y" * 3000
ECHO = 200
"""The largest number of characters of a request that an error repeats."""


def test_field_size_is_checked_before_the_field_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large parameter is refused, and no value of the body has been decoded."""
    decoded = []
    decode = msgspec.json.decode

    def record(data: Any, **options: Any) -> Any:
        decoded.append(options)
        return decode(data, **options)

    monkeypatch.setattr(parsing.msgspec.json, "decode", record)
    ids = "[" + "1," * MAX_FIELD + "1]"
    for name in ("stop_token_ids", "stop", "logit_bias", "metadata", "functions", "nothing"):
        decoded.clear()
        with pytest.raises(ApiError, match=f"{name} is larger than 65536 bytes") as error:
            parse(f'{{"prompt": "x", "{name}": {ids}}}'.encode(), CompletionRequest)
        assert (error.value.status, error.value.param) == (400, name)
        assert decoded == [{"type": dict[str, msgspec.Raw]}]


def test_number_of_prompts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many prompts are refused before they become prompts; lists of token ids before they are decoded."""
    most = parse(json.dumps({"prompt": [[1]] * MAX_PROMPTS}).encode(), CompletionRequest)
    assert len(most.to_prompts()) == MAX_PROMPTS
    monkeypatch.setattr(completion, "tokens_prompt", None)
    monkeypatch.setattr(completion, "TextPrompt", None)
    for prompts in ([[]], [[1]], ["x"], [[["x"]]]):
        with pytest.raises(ApiError, match="at most 4096 prompts") as error:
            check_work(parse(json.dumps({"prompt": prompts * (MAX_PROMPTS + 1)}).encode(), CompletionRequest), 2048)
        assert (error.value.status, error.value.param) == (400, "prompt")


@pytest.mark.parametrize("item", ["[]", "[[]]", "{}", '""', "1", '{"a":1}', '{"role":"user"}', "[1]", "null"])
def test_cost_of_a_body_of_the_largest_default_size(item: str) -> None:
    """A body of 1 MiB of small values takes well under 2 s of CPU time, whatever the values are."""
    items = "[" + ",".join([item] * (MIN_BODY // (len(item) + 1) - 20)) + "]"
    kinds = [("prompt", CompletionRequest, "to_prompts"), ("messages", FullChatRequest, "to_prompt")]
    gc.freeze()  # the objects of other tests, which a collection would visit
    try:
        for name, kind, convert in kinds:
            body = f'{{"{name}": {items}}}'.encode()
            start = time.thread_time()
            with contextlib.suppress(ApiError):
                getattr(parse(body, kind), convert)()
            assert time.thread_time() - start < 2.0
    finally:
        gc.unfreeze()


def of_size(path: str, body: dict[str, Any]) -> bytes:
    encoded = json.dumps(body, separators=(",", ":")).encode()
    assert len(encoded) < MIN_BODY, path
    return encoded


def turns(content: Any, count: int, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}] * count, **more}


CALL = {"role": "assistant", "content": None, "tool_calls": [{"a": [0] * 100_000}]}
TOO_MANY_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "empty turns": (CHAT, turns("", 20_000)),
    "turns of content marks": (CHAT, turns("<", 20_000)),
    "turns to tokenize": ("/tokenize", turns("", 20_000)),
    "content parts": (CHAT, turns([{"type": "text", "text": ""}] * 20_000, 1)),
    "tool calls": (CHAT, {"messages": [*USER, CALL]}),
    "template variables": (CHAT, turns("x", 1, chat_template_kwargs={"a": [0] * 30_000})),
    "ids": ("/detokenize", {"tokens": [9] * 300_000}),
}


def check_work(body: msgspec.Struct, max_seq_len: int) -> None:
    Bounds(HttpConfig()).check_body(body, max_seq_len)
    if isinstance(body, DetokenizeBody):
        check_tokens(body, max_seq_len)


@pytest.mark.parametrize("name", TOO_MANY_PARTS)
def test_parts_are_counted_before_any_work(name: str) -> None:
    """A body of many small parts costs the API server little more than its decoding, and the tokenizer nothing."""
    path, body = TOO_MANY_PARTS[name]
    kind = {CHAT: FullChatRequest, "/tokenize": TokenizeBody, "/detokenize": DetokenizeBody}[path]
    parsed = parse(of_size(path, body), kind)
    start = time.thread_time()
    with pytest.raises(ApiError) as error:
        check_work(parsed, 2048)
    assert time.thread_time() - start < 0.1
    assert (error.value.status, error.value.code) == (400, "context_length_exceeded")


@pytest.mark.xdist_group("tutor")
@pytest.mark.parametrize("name", TOO_MANY_PARTS)
def test_server_refuses_too_many_parts(tutor: Server, name: str) -> None:
    path, body = TOO_MANY_PARTS[name]
    error = error_of(httpx.post(f"{tutor.url}{path}", content=of_size(path, body), timeout=60), 400)
    assert error["code"] == "context_length_exceeded"
    assert "2048 tokens" in error["message"]


def test_allowed_parts() -> None:
    """The largest number of messages, values and ids is allowed."""
    for body in (turns("", 8), turns([{"type": "text", "text": ""}] * 10, 1)):
        check_work(parse(of_size(CHAT, body), FullChatRequest), 8)
    check_work(DetokenizeBody(tokens=[1] * 8), 8)


@pytest.mark.parametrize(("size", "other_thread"), [(SMALL_BODY - 100, False), (SMALL_BODY + 100, True)])
def test_large_bodies_are_parsed_in_another_thread(size: int, other_thread: bool) -> None:
    threads = []

    def convert(body: CompletionRequest) -> int:
        threads.append(threading.current_thread())
        return len(body.to_prompts())

    body = json.dumps({"prompt": "x" * size}).encode()
    parsed, prompts = asyncio.run(parse_body(body, CompletionRequest, convert))
    assert (len(parsed.prompt), prompts) == (size, 1)
    assert (threads[0] is not threading.main_thread()) == other_thread


@pytest.mark.parametrize("headers", [{}, {"content-length": "11"}, {"content-length": "9" * 5000}])
def test_body_over_the_limit_is_not_read(headers: dict[str, str]) -> None:
    """At most the part that exceeds the limit is read; with a content length, no part at all."""
    received = []

    async def receive() -> dict[str, Any]:
        received.append(1)
        return {"type": "http.request", "body": b"12345", "more_body": True}

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "headers": raw}
    with pytest.raises(ApiError, match="larger than 10 bytes") as error:
        asyncio.run(Request(scope, counted(scope, receive, 10)).body())
    assert error.value.status == 413
    assert len(received) == (0 if headers else 3)


def test_default_of_max_body() -> None:
    assert HttpConfig().body_limit(2048) == MIN_BODY
    assert HttpConfig().body_limit(131072) == 64 * 131072
    assert HttpConfig(max_body=5).body_limit(131072) == 5


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """Start a server with ``server.max_body=10000``."""
    with Server("model=tutor", "num_pages=64", "server.max_body=10000") as server:
        yield server


def test_max_body(small: Server) -> None:
    for path in (PLAIN, CHAT, "/tokenize", "/detokenize"):
        error = error_of(httpx.post(f"{small.url}{path}", content=b" " * 10001, timeout=60), 413)
        assert error["code"] == "request_too_large"
        error_of(httpx.post(f"{small.url}{path}", content=b" " * 10000, timeout=60), 400)
    assert_serves(small)


ECHOES: dict[str, tuple[str, dict[str, Any]]] = {
    "model": (PLAIN, {"prompt": "x", "model": LONG}),
    "parameter": (PLAIN, {"prompt": "x", LONG: 1}),
    "stream option": (PLAIN, {"prompt": "x", "stream": True, "stream_options": {LONG: 1}}),
    "logit_bias key": (PLAIN, {"prompt": "x", "logit_bias": {LONG: 1}}),
    "logit_bias": (PLAIN, {"prompt": "x", "logit_bias": {str(i): 101 for i in range(1000)}}),
    "stop_token_ids": (PLAIN, {"prompt": "x", "stop_token_ids": [2**40] * 500}),
    "stop": (PLAIN, {"prompt": "x", "stop": [LONG, LONG]}),
    "cache_salt": (PLAIN, {"prompt": "x", "cache_salt": LONG}),
    "content part": (CHAT, {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
    "content part of a list": (CHAT, {"messages": [{"role": "user", "content": [{"type": [LONG] * 2}]}]}),
    "message field": (CHAT, {"messages": [{**USER[0], LONG: 1}]}),
    "template variable": (CHAT, {"messages": USER, "chat_template_kwargs": {LONG: 1}}),
    "route": (f"/v1/{LONG}", {}),
}


@pytest.mark.parametrize("name", ECHOES)
def test_errors_repeat_little_of_the_request(small: Server, name: str) -> None:
    path, body = ECHOES[name]
    answer = httpx.post(f"{small.url}{path}", json=body, timeout=60)
    assert answer.status_code in (400, 404)
    assert answer.text.count("y") <= ECHO
    assert len(answer.text) < 2 * ECHO + 200


def test_model_route_repeats_little_of_the_request(small: Server) -> None:
    assert httpx.get(f"{small.url}/v1/models/{LONG}", timeout=60).text.count("y") <= ECHO
