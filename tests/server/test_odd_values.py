"""Requests with integers outside 64 bits and with deep nesting: each gets 400, and leaves no open request behind."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from minisgl.core import SamplingParams
from minisgl.message import ChatPrompt, TextPrompt
from minisgl.plugins.http.bounds import MAX_DEPTH
from minisgl.testing.serving import Server

from .test_dispatch import FakeServer, with_fake_server
from .test_errors import CHAT, PLAIN, assert_serves, error_of

pytestmark = pytest.mark.xdist_group("tutor")  # one process: the server starts once

HUGE = 2**64


def nested(depth: int, opening: str = "[", closing: str = "]") -> str:
    return opening * depth + "1" + closing * depth


def plain(fields: str) -> tuple[str, str]:
    return PLAIN, '{"prompt": "Hi", ' + fields + "}"


def chat(fields: str, message: str = "") -> tuple[str, str]:
    return CHAT, '{"messages": [{"role": "user", "content": "Hi"' + message + "}], " + fields + "}"


def tokenize(fields: str) -> tuple[str, str]:
    return "/tokenize", chat(fields)[1]


ODD: dict[str, tuple[tuple[str, str], str | None]] = {
    **{
        f"{name} {value}": (plain(f'"{name}": {value}'), name)
        for name in ("max_tokens", "top_k", "n", "seed", "logprobs", "prompt_logprobs", "temperature", "min_p")
        for value in (HUGE, -HUGE)
    },
    "max_completion_tokens": (chat(f'"max_completion_tokens": {HUGE}'), "max_completion_tokens"),
    "top_logprobs": (chat(f'"logprobs": true, "top_logprobs": {HUGE}'), "top_logprobs"),
    "stop_token_ids": (plain(f'"stop_token_ids": [{HUGE}]'), "stop_token_ids"),
    "logit_bias key": (plain(f'"logit_bias": {{"{HUGE}": 1}}'), "logit_bias"),
    "logit_bias key of 5000 digits": (plain(f'"logit_bias": {{"{"9" * 5000}": 1}}'), "logit_bias"),
    "logit_bias key with an underscore": (plain('"logit_bias": {"1_0": 1}'), "logit_bias"),
    "logit_bias key with a space": (plain('"logit_bias": {" 1": 1}'), "logit_bias"),
    "logit_bias key of Arabic digits": (plain('"logit_bias": {"\\u0661": 1}'), "logit_bias"),
    "logit_bias value": (plain(f'"logit_bias": {{"5": {HUGE}}}'), "logit_bias"),
    "prompt": ((PLAIN, f'{{"prompt": [{HUGE}]}}'), "prompt"),
    "integer of 5000 digits": (plain(f'"n": {"9" * 5000}'), None),
    "chat_template_kwargs": (chat(f'"chat_template_kwargs": {{"a": {HUGE}}}'), "chat_template_kwargs"),
    "nested chat_template_kwargs": (
        chat(f'"chat_template_kwargs": {{"a": [{{"b": {-HUGE}}}]}}'), "chat_template_kwargs",
    ),
    "tokenize with chat_template_kwargs": (
        tokenize(f'"chat_template_kwargs": {{"a": {HUGE}}}'), "chat_template_kwargs",
    ),
    "tool_calls": (chat('"n": 1', f', "tool_calls": [{{"a": {HUGE}}}]'), "messages"),
    "detokenize": (("/detokenize", f'{{"tokens": [{HUGE}]}}'), "tokens"),
    **{
        f"depth {depth}: {what}": (request, param if depth < 900 else None)
        for depth in (MAX_DEPTH + 1, 930, 970, 100_000)
        for what, request, param in (
            ("prompt", (PLAIN, f'{{"prompt": {nested(depth)}}}'), "prompt"),
            ("kwargs", chat(f'"chat_template_kwargs": {{"a": {nested(depth)}}}'), "chat_template_kwargs"),
            ("tool_calls", chat('"n": 1', f', "tool_calls": [{{"a": {nested(depth)}}}]'), "messages"),
            ("tools", chat(f'"tools": {nested(depth)}'), "tools"),
            ("tokenize", tokenize(f'"chat_template_kwargs": {{"a": {nested(depth)}}}'), "chat_template_kwargs"),
        )
    },
}  # fmt: skip


def test_odd_values(tutor: Server) -> None:
    """Each odd value gets 400, with the parameter's name if the body could be read, and the server keeps serving."""
    wrong: dict[str, Any] = {}
    with httpx.Client(base_url=tutor.url, timeout=60) as http:
        for name, ((path, body), param) in ODD.items():
            for content in (body, body[:-1] + ', "stream": true}') if path != "/detokenize" else (body,):
                if path == "/tokenize" and content != body:
                    continue
                answer = http.post(path, content=content)
                error = answer.json().get("error", {"param": None})
                if answer.status_code != 400 or (param is not None and error["param"] != param):
                    wrong[name] = (answer.status_code, error)
    assert wrong == {}
    assert tutor.wait_until_idle()
    assert_serves(tutor)


def test_promise_1_unsendable_requests_leave_nothing_open(tutor: Server) -> None:
    """As many requests as fill ``server.max_queued`` fail before they reach a tokenizer; the next one is served."""
    with httpx.Client(base_url=tutor.url, timeout=60) as http:
        for _ in range(33):
            error_of(http.post(CHAT, content=chat(f'"n": 128, "chat_template_kwargs": {{"a": {HUGE}}}')[1]), 400)
        error_of(http.post(CHAT, content=chat(f'"n": 128, "max_tokens": {HUGE}')[1]), 400)
    assert tutor.metrics()["minisgl_open_requests"] == 0
    assert_serves(tutor)


@pytest.mark.parametrize("value", [HUGE, -HUGE, object()])
def test_promise_1_encoding_error_registers_nothing(value: object) -> None:
    """A prompt that can't be encoded, alone or after a good prompt, leaves no open request and sends no message."""

    async def test(server: FakeServer) -> None:
        bad = ChatPrompt([], True, {"a": value})
        for prompts in ([bad], [TextPrompt("x"), bad]):
            with pytest.raises((OverflowError, TypeError)):
                server.dispatcher.submit(prompts, SamplingParams(n=3), max_tokens_from_context=False)
            assert server.dispatcher.num_open == 0
            assert await server.dispatcher.wait_until_idle(0.0)
        await asyncio.to_thread(server.tokenizers[0].receive)  # the limits
        assert not server.tokenizers[0].wait(0.1)

    with_fake_server(test, tokenizers=1)


def test_promise_1_sending_error_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the second of two messages can't be sent, the request of the first is aborted."""

    async def test(server: FakeServer) -> None:
        push = server.dispatcher._tokenizers[0]
        send, sent = push.send_bytes, []

        def fail_second(data: bytes) -> None:
            if sent:
                raise OSError("no buffer")
            sent.append(data)
            send(data)

        monkeypatch.setattr(push, "send_bytes", fail_second)
        with pytest.raises(OSError, match="no buffer"):
            server.dispatcher.submit([TextPrompt("x")] * 2, SamplingParams(), max_tokens_from_context=False)
        assert server.dispatcher.num_open == 0
        kinds = [type(await server.get(server.tokenizers[0])).__name__ for _ in range(3)]
        assert kinds == ["Limits", "Submit", "Abort"]

    with_fake_server(test, tokenizers=1)
