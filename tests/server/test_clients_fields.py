"""What clients send beside the prompt: hints, small routes, wrong methods, and the names in errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from minisgl.plugins.http.compatible import HINTS
from minisgl.plugins.http.other_apis import ABSENT
from minisgl.testing.serving import Server
from minisgl.utils.version import __version__

pytestmark = pytest.mark.xdist_group("tutor")  # one process: the server starts once
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Hi"}]


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def test_hints_are_accepted_and_counted(tutor: Server) -> None:
    """A hint changes nothing but its count. A hint with the value null is none."""
    plain = post(tutor, CHAT, messages=USER, max_tokens=5, temperature=0).json()
    before = tutor.metrics()
    for name in sorted(HINTS):
        for body in ({"prompt": "Hi"}, {"messages": USER}):
            path = CHAT if "messages" in body else PLAIN
            answer = post(tutor, path, **body, max_tokens=5, temperature=0, **{name: "x"})
            assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == plain["choices"]
    post(tutor, CHAT, messages=USER, max_tokens=1, user=None)
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    cached = post(tutor, CHAT, messages=[{"role": "user", "content": [part]}], max_tokens=5, temperature=0)
    assert cached.json()["choices"] == plain["choices"]
    named = post(tutor, CHAT, messages=[{**USER[0], "name": "Ada"}], max_tokens=5, temperature=0)
    assert named.json()["choices"] == plain["choices"]
    after = tutor.metrics()
    for name, count in {**dict.fromkeys(HINTS, 2), "cache_control": 1, "name": 1}.items():
        key = f'minisgl_hint_parameters_total{{name="{name}"}}'
        assert after[key] - before.get(key, 0) == count, name


def test_small_routes(tutor: Server) -> None:
    with httpx.Client(base_url=tutor.url, timeout=60) as http:
        assert http.get("/version").json() == {"version": __version__}
        assert http.get("/").json()["version"] == __version__
        for method in ("GET", "HEAD"):
            for path in ("/", "/version", "/ping", "/health", "/v1/models"):
                assert http.request(method, path).status_code == 200, (method, path)
        assert http.post("/ping").status_code == 200


@pytest.mark.parametrize(("method", "path", "allowed"), [("GET", CHAT, {"POST"}), ("PUT", "/health", {"GET", "HEAD"})])
def test_wrong_method_is_no_unknown_url(tutor: Server, method: str, path: str, allowed: set[str]) -> None:
    answer = httpx.request(method, f"{tutor.url}{path}")
    assert answer.status_code == 405
    assert set(answer.headers["allow"].split(", ")) == allowed
    assert answer.json()["error"]["code"] == "method_not_allowed"
    assert all(name in answer.json()["error"]["message"] for name in allowed)
    assert httpx.get(f"{tutor.url}/v1/nothing").json()["error"]["code"] == "unknown_url"


def test_routes_of_other_apis_are_refused_by_name(tutor: Server, client: openai.OpenAI) -> None:
    for path, why in ABSENT.items():
        answer = post(tutor, path)
        assert answer.status_code == 404
        assert path in answer.json()["error"]["message"]
        assert why in answer.json()["error"]["message"]
    with pytest.raises(openai.NotFoundError, match="computes no embeddings"):
        client.embeddings.create(model="tutor", input="Hi")


def test_context_error_is_known_to_litellm(tutor: Server) -> None:
    """litellm looks for these words to raise ContextWindowExceededError."""
    long = [{"role": "user", "content": "seven " * 3000}]
    for answer in (
        post(tutor, CHAT, messages=long),
        post(tutor, CHAT, messages=long, max_tokens=5),
        post(tutor, PLAIN, prompt=[5] * 4000),
        post(tutor, PLAIN, prompt="seven " * 2040, max_tokens=2000),
        post(tutor, CHAT, messages=[{"role": "user", "content": "x"}] * 3000),
        post(tutor, "/detokenize", tokens=[5] * 4000),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["message"].startswith("This model's maximum context length is 2048 tokens.")


def test_errors_name_the_field_that_was_sent(tutor: Server) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        for value in (-3, 2048):
            error = post(tutor, CHAT, messages=USER, **{name: value}).json()["error"]
            assert error["param"] == name
            assert name in error["message"].replace("max_completion_tokens", name)
            assert ("max_tokens" in error["message"]) == (name == "max_tokens")


@pytest.mark.parametrize("chat", [True, False])
def test_continuous_usage(tutor: Server, chat: bool) -> None:
    """As in vLLM, each chunk has the usage so far, if the client also asks for the usage."""
    body: dict[str, Any] = {"messages": USER} if chat else {"prompt": ["Hi", "Ho ho"]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body |= {"max_tokens": 6, "ignore_eos": True, "stream": True, "n": 2}
    path = CHAT if chat else PLAIN

    def chunks(options: dict[str, bool]) -> list[dict[str, Any]]:
        lines = post(tutor, path, **body, stream_options=options).text.splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    found = [chunk["usage"] for chunk in chunks(options)]
    last = found[-1]
    assert last["completion_tokens"] == 6 * (2 if chat else 4)
    counts = [usage["completion_tokens"] for usage in found]
    assert counts == sorted(counts)
    assert len(set(counts)) > 2
    assert {usage["prompt_tokens"] for usage in found} == {last["prompt_tokens"]}
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in found)
    assert counts[-2] == last["completion_tokens"]
    assert all("usage" not in chunk for chunk in chunks({"continuous_usage_stats": True}))


def test_start(run_app: Callable[..., None]) -> None:
    """While it loads, the server says when to ask again, also to a chat with tools."""
    tool = {"type": "function", "function": {"name": "f"}}

    async def test(server: Any) -> None:
        spec, server.dispatcher.spec = server.dispatcher.spec, None
        server.dispatcher.state, server.dispatcher.reason = "starting", "The server is starting."
        async with server.client() as client:
            for path in ("/v1/models", "/health", "/ready", "/ping", "/server_info", "/metrics"):
                answer = await client.get(path)
                assert (answer.status_code, answer.headers.get("retry-after")) == (503, "2"), path
            for more in ({}, {"tools": [tool]}, {"tools": [tool], "tool_choice": "required"}):
                answer = await client.post(CHAT, json={"messages": USER, **more})
                assert (answer.status_code, answer.headers.get("retry-after")) == (503, "2"), more
            server.dispatcher.state, server.dispatcher.spec = "ready", spec
            assert (await client.get("/v1/models")).status_code == 200

    run_app(test)


def test_rules_about_tokens(tutor: Server) -> None:
    """``min_tokens``, ``bad_words`` and ``allowed_token_ids`` over HTTP: see tests/scheduler/test_token_rules.py."""
    body = {"messages": USER, "max_tokens": 60, "temperature": 0, "return_token_ids": True}
    plain = post(tutor, CHAT, **body).json()
    assert plain["usage"]["completion_tokens"] < 40
    answer = post(tutor, CHAT, **body, min_tokens=40, stream=True).text
    assert answer.count('"token_ids"') >= 40
    assert post(tutor, CHAT, **body, min_tokens=40).json()["usage"]["completion_tokens"] >= 40
    allowed = post(tutor, CHAT, **body, allowed_token_ids=[100, 101]).json()["choices"][0]
    assert set(allowed["token_ids"]) <= {100, 101}
    first = plain["choices"][0]["message"]["content"].split()[0]
    without = post(tutor, CHAT, **body, bad_words=[first]).json()["choices"][0]["message"]["content"]
    assert without.split()[0] != first
    for wrong in ({"min_tokens": 61}, {"allowed_token_ids": [5000]}, {"allowed_token_ids": []}, {"bad_words": [""]}):
        error = post(tutor, CHAT, **body, **wrong).json()["error"]
        assert error["param"] == next(iter(wrong))
    error = post(tutor, CHAT, messages=USER, min_tokens=2040).json()["error"]  # the context has fewer tokens left
    assert error["param"] == "min_tokens"


def test_truncated_prompts(tutor: Server) -> None:
    """Of a long prompt, only the last tokens are kept: those of a text, a chat, and token ids."""
    body = {"max_tokens": 3, "temperature": 0, "return_token_ids": True}
    ids = list(range(100, 140))
    kept = post(tutor, PLAIN, prompt=ids[-7:], **body).json()
    for prompt in (ids, [ids], [5] * 3000 + ids):
        answer = post(tutor, PLAIN, prompt=prompt, truncate_prompt_tokens=7, **body).json()
        assert answer["usage"]["prompt_tokens"] == 7
        assert answer["choices"] == kept["choices"]
    long = [{"role": "user", "content": "Tell me of pages. " * 300}]
    for path, fields in ((CHAT, {"messages": long}), (PLAIN, {"prompt": "seven " * 2500})):
        assert post(tutor, path, **fields, **body, truncate_prompt_tokens=9).json()["usage"]["prompt_tokens"] == 9
    assert post(tutor, PLAIN, prompt="Hi", truncate_prompt_tokens=500, **body).status_code == 200
    for value in (0, -1):
        error = post(tutor, PLAIN, prompt="Hi", truncate_prompt_tokens=value).json()["error"]
        assert error["param"] == "truncate_prompt_tokens"


def test_no_generation_prompt(tutor: Server) -> None:
    """``add_generation_prompt: false`` leaves out the beginning of the answer's message."""
    counts = [
        post(tutor, CHAT, messages=USER, max_tokens=1, add_generation_prompt=value).json()["usage"]["prompt_tokens"]
        for value in (True, False)
    ]
    tokens = [
        post(tutor, "/tokenize", messages=USER, add_generation_prompt=value).json()["count"] for value in (True, False)
    ]
    assert counts == tokens
    assert counts[0] > counts[1]
