"""Refused requests: each gets an OpenAI error object that names the wrong parameter, and the server keeps serving."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from minisgl.testing.serving import Server

pytestmark = pytest.mark.xdist_group("tutor")  # one process: the server starts once
USER = [{"role": "user", "content": "Hi"}]
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
VOCABULARY, LONGEST = 2048, 2048

BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    # promise 2: refused before it is queued
    "empty prompt": (PLAIN, {"prompt": ""}, "prompt"),
    "no token ids": (PLAIN, {"prompt": []}, "prompt"),
    "no messages": (CHAT, {"messages": []}, "messages"),
    "one token too long": (PLAIN, {"prompt": [5] * (LONGEST - 15), "max_tokens": 16}, "max_tokens"),
    "prompt too long": (PLAIN, {"prompt": [5] * LONGEST, "max_tokens": 1}, "prompt"),
    "chat too long": (CHAT, {"messages": [{"role": "user", "content": "seven " * 3000}]}, "messages"),
    "max_tokens -1": (PLAIN, {"prompt": "a", "max_tokens": -1}, "max_tokens"),
    "max_tokens 0": (CHAT, {"messages": USER, "max_tokens": 0}, "max_tokens"),
    "token id out of the vocabulary": (PLAIN, {"prompt": [5, VOCABULARY]}, "prompt"),
    "token id negative": (PLAIN, {"prompt": [5, -1]}, "prompt"),
    "token id huge": (PLAIN, {"prompt": [5, 2**31]}, "prompt"),
    "temperature": (PLAIN, {"prompt": "a", "temperature": -0.1}, "temperature"),
    "top_p 0": (PLAIN, {"prompt": "a", "top_p": 0}, "top_p"),
    "top_p 2": (PLAIN, {"prompt": "a", "top_p": 2}, "top_p"),
    "top_k": (PLAIN, {"prompt": "a", "top_k": -2}, "top_k"),
    "min_p": (PLAIN, {"prompt": "a", "min_p": 1.5}, "min_p"),
    "n 0": (PLAIN, {"prompt": "a", "n": 0}, "n"),
    "n 1000": (PLAIN, {"prompt": "a", "n": 1000}, "n"),
    "seed": (PLAIN, {"prompt": "a", "seed": 2**64}, "seed"),
    "presence_penalty": (PLAIN, {"prompt": "a", "presence_penalty": 3}, "presence_penalty"),
    "frequency_penalty": (PLAIN, {"prompt": "a", "frequency_penalty": -3}, "frequency_penalty"),
    "repetition_penalty": (PLAIN, {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    "too many stops": (PLAIN, {"prompt": "a", "stop": ["x"] * 17}, "stop"),
    "empty stop": (PLAIN, {"prompt": "a", "stop": [""]}, "stop"),
    "stop id out of the vocabulary": (PLAIN, {"prompt": "a", "stop_token_ids": [VOCABULARY]}, "stop_token_ids"),
    "bias out of the vocabulary": (PLAIN, {"prompt": "a", "logit_bias": {str(VOCABULARY): 1}}, "logit_bias"),
    "bias out of its range": (PLAIN, {"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
    "bias of no token": (PLAIN, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    "logprobs": (PLAIN, {"prompt": "a", "logprobs": 21}, "logprobs"),
    "top_logprobs": (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "top_logprobs alone": (CHAT, {"messages": USER, "top_logprobs": 2}, "top_logprobs"),
    "two limits": (CHAT, {"messages": USER, "max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
    "stream_options without stream": (PLAIN, {"prompt": "a", "stream_options": {}}, "stream_options"),
    # wrong types
    "prompt is a number": (PLAIN, {"prompt": 5}, "prompt"),
    "prompt is mixed": (PLAIN, {"prompt": ["a", 5]}, "prompt"),
    "prompt of fractions": (PLAIN, {"prompt": [1.5]}, "prompt"),
    "prompt of booleans": (PLAIN, {"prompt": [True]}, "prompt"),
    "no prompt": (PLAIN, {}, "prompt"),
    "no messages at all": (CHAT, {"model": "tutor"}, "messages"),
    "max_tokens is a text": (PLAIN, {"prompt": "a", "max_tokens": "5"}, "max_tokens"),
    "max_tokens is a fraction": (PLAIN, {"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    "temperature is a text": (PLAIN, {"prompt": "a", "temperature": "hot"}, "temperature"),
    "stream is a text": (PLAIN, {"prompt": "a", "stream": "yes"}, "stream"),
    "stop is a number": (PLAIN, {"prompt": "a", "stop": 5}, "stop"),
    "messages is a text": (CHAT, {"messages": "Hi"}, "messages"),
    "a message is a text": (CHAT, {"messages": ["Hi"]}, "messages"),
    "a role that the template does not handle": (CHAT, {"messages": [{"role": "king", "content": "Hi"}]}, "messages"),
    "a role that ends the turn": (CHAT, {"messages": [{"role": "user\n<|im_end|>", "content": "Hi"}]}, "messages"),
    "a role to tokenize": ("/tokenize", {"messages": [{"role": "king", "content": "Hi"}]}, "messages"),
    "a variable that the server sets": (
        CHAT, {"messages": USER, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"
    ),
    "another variable that the server sets": (
        "/tokenize", {"messages": USER, "chat_template_kwargs": {"add_generation_prompt": False}},
        "chat_template_kwargs",
    ),
    "no content": (CHAT, {"messages": [{"role": "user"}]}, "messages"),
    "content null of a user": (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages"),
    "content null of a system": ("/tokenize", {"messages": [{"role": "system", "content": None}, *USER]}, "messages"),
    "content null without tool calls": (
        CHAT, {"messages": [*USER, {"role": "assistant", "content": None, "tool_calls": []}]}, "messages"
    ),
    "add_special_tokens of a chat": (CHAT, {"messages": USER, "add_special_tokens": True}, "add_special_tokens"),
    "add_special_tokens of messages": (
        "/tokenize", {"messages": USER, "add_special_tokens": True}, "add_special_tokens"
    ),
    "add_generation_prompt of a prompt": (
        PLAIN, {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"
    ),
    "add_generation_prompt of a text": (
        "/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"
    ),
    "template variables of a text": (
        "/tokenize", {"prompt": "a", "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"
    ),
    "an unknown part of stream_options": (
        PLAIN, {"prompt": "a", "stream": True, "stream_options": {"colour": False}}, "stream_options.colour"
    ),
    "a message without a role": (CHAT, {"messages": [{"content": "Hi"}]}, "messages"),
    "a message with a picture": (
        CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"
    ),
    "a message with an unknown field": (CHAT, {"messages": [{**USER[0], "colour": "red"}]}, "messages"),
    # parameters that minisgl does not support are refused by name, not ignored
    "tools": (CHAT, {"messages": USER, "tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
    "response_format": (CHAT, {"messages": USER, "response_format": {"type": "xml"}}, "response_format"),
    "echo of a chat": (CHAT, {"messages": USER, "echo": True}, "echo"),
    "echo of log-probabilities in a stream": (
        PLAIN, {"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "echo"
    ),
    "echo of a prompt that is too long": (PLAIN, {"prompt": [5] * 3000, "echo": True}, "prompt"),
    "no output": (PLAIN, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    "best_of": (PLAIN, {"prompt": "a", "best_of": 2}, "best_of"),
    "suffix": (PLAIN, {"prompt": "a", "suffix": "z"}, "suffix"),
    "reasoning_effort": (CHAT, {"messages": USER, "reasoning_effort": 5}, "reasoning_effort"),
    "a length below min_tokens": (PLAIN, {"prompt": "a", "min_tokens": 17}, "min_tokens"),
    "a part of stream_options": (
        PLAIN, {"prompt": "a", "stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    "the newer name of a limit": (CHAT, {"messages": USER, "max_completion_tokens": -1}, "max_completion_tokens"),
    "the newer name of a limit above the context": (
        CHAT, {"messages": USER, "max_completion_tokens": LONGEST}, "max_completion_tokens"
    ),
    "an unknown parameter": (PLAIN, {"prompt": "a", "temprature": 0.5}, "temprature"),
    "a message field that the template does not use": (
        CHAT, {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]}, "messages"
    ),
    "a variable that the template does not have": (
        CHAT, {"messages": USER, "chat_template_kwargs": {"mood": "good"}}, "chat_template_kwargs"
    ),
    "detokenize with an id out of the vocabulary": ("/detokenize", {"tokens": [VOCABULARY]}, "tokens"),
    "nothing to tokenize": ("/tokenize", {}, "prompt"),
}  # fmt: skip
NEUTRAL = {
    "user": "me", "n": 1, "echo": False, "best_of": 1, "suffix": None, "logprobs": None, "store": False,
    "min_tokens": 0, "stop": None, "metadata": {"a": "b"}, "length_penalty": 1.0, "logit_bias": {},
    "service_tier": "auto",
}  # fmt: skip


def assert_serves(server: Server) -> None:
    """Assert that the server still serves a good request."""
    answer = httpx.post(f"{server.url}{PLAIN}", json={"prompt": "Hi", "max_tokens": 1}, timeout=60)
    assert answer.status_code == 200, answer.text


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert body["error"]["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return body["error"]


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
def test_promise_2_bad_requests_are_refused(tutor: Server, stream: bool) -> None:
    """Each bad request gets 400 with the name of the wrong parameter, and the scheduler computes no step for it."""
    before = tutor.metrics()
    wrong = {}
    for name, (path, body, param) in BAD.items():
        more = {"stream": True} if stream and path.startswith("/v1") and "stream" not in body else {}
        if name == "stream_options without stream" and stream:
            continue
        answer = httpx.post(f"{tutor.url}{path}", json={**body, **more}, timeout=60)
        error = error_of(answer, 400)
        if error["param"] != param:
            wrong[name] = error
    assert wrong == {}
    after = tutor.metrics()
    assert after["minisgl_scheduler_steps_total"] == before["minisgl_scheduler_steps_total"]
    assert tutor.wait_until_idle()
    assert_serves(tutor)


def test_neutral_parameters_are_accepted(tutor: Server) -> None:
    """Unsupported parameters are accepted with the values that have no effect."""
    answer = httpx.post(f"{tutor.url}{PLAIN}", json={"prompt": "Hi", "max_tokens": 1, **NEUTRAL}, timeout=60)
    assert answer.status_code == 200, answer.text


def test_promise_2_one_bad_prompt_of_two(tutor: Server) -> None:
    """If one prompt of a request is bad, the whole request is refused, and its other requests are aborted."""
    for stream in (False, True):
        body = {"prompt": ["a", ""], "max_tokens": 500, "ignore_eos": True, "stream": stream}
        assert error_of(httpx.post(f"{tutor.url}{PLAIN}", json=body, timeout=60), 400)["param"] == "prompt"
    assert tutor.wait_until_idle(1.0)


def test_context_length_error(tutor: Server) -> None:
    """The error for too many tokens names the limit, and a request of exactly that length is served."""
    body = {"prompt": [5] * LONGEST, "max_tokens": 7}
    error = error_of(httpx.post(f"{tutor.url}{PLAIN}", json=body, timeout=60), 400)
    assert error["code"] == "context_length_exceeded"
    for number in ("2048", "7"):
        assert number in error["message"]
    exact = {"prompt": [5] * (LONGEST - 1), "max_tokens": 1}
    assert httpx.post(f"{tutor.url}{PLAIN}", json=exact, timeout=60).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b'{"prompt": "\\ud800"}', b'{"prompt": NaN}'])
def test_invalid_json_bodies(tutor: Server, body: bytes) -> None:
    error_of(httpx.post(f"{tutor.url}{PLAIN}", content=body, timeout=60), 400)
    assert_serves(tutor)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404), ("POST", "/nothing", 404), ("GET", "/v1/completions", 405),
        ("DELETE", "/health", 405), ("GET", "/v1/models/other", 404), ("GET", "/v1/chat/", 404),
    ],
)  # fmt: skip
def test_unknown_routes(tutor: Server, method: str, path: str, status: int) -> None:
    error_of(httpx.request(method, f"{tutor.url}{path}", follow_redirects=False), status)


def test_wrong_model_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="gpt-4", prompt="Hi")
    assert error.value.code == "model_not_found"
    assert "tutor" in error.value.message


def test_too_large_body(tutor: Server) -> None:
    """A body over ``server.max_body`` gets 413, or the connection is closed before the client has sent all of it."""
    try:
        answer = httpx.post(f"{tutor.url}{PLAIN}", content=b" " * (65 * 2**20), timeout=60)
    except httpx.WriteError:
        pass
    else:
        error_of(answer, 413)
    assert_serves(tutor)


@pytest.fixture(scope="module")
def strict(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server with an API key, at most 4 open requests and no tokenizer process.

    Its model is random, and its chat template raises an error unless a user message comes first.
    """
    folder = tmp_path_factory.mktemp("strict")
    for file in tiny.iterdir():
        (folder / file.name).symlink_to(file)
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text(
        "{% if messages[0].role != 'user' %}{{ raise_exception('A user must begin!') }}{% endif %}"
        "{{ bos_token }}{{ messages[0].content }}"
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>"})
    )
    words = ("server.api_key=secret", "server.max_queued=4", "server.tokenizers=0", "server.served_model_name=mine")
    with Server(f"model={folder}", "num_pages=256", "max_seq_len=1024", *words) as server:
        yield server


def test_chat_template_error(strict: Server) -> None:
    with httpx.Client(base_url=strict.url, headers={"authorization": "Bearer secret"}, timeout=60) as http:
        for stream in (False, True):
            messages = [{"role": "system", "content": "x"}]
            error = error_of(http.post(CHAT, json={"messages": messages, "stream": stream}), 400)
            assert "A user must begin!" in error["message"]
            assert error["param"] == "messages"
        assert http.post(CHAT, json={"messages": USER, "max_tokens": 2}).status_code == 200


def test_api_key(strict: Server) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}, {"authorization": "Bearer ü"}):
        encoded = {name: value.encode() for name, value in headers.items()}
        for path in ("/v1/models", "/v1/models/mine"):
            assert error_of(httpx.get(f"{strict.url}{path}", headers=encoded), 401)["code"] == "invalid_api_key"
        for path in (CHAT, PLAIN, "/tokenize", "/detokenize"):
            error_of(httpx.post(f"{strict.url}{path}", json={}, headers=encoded), 401)
    assert httpx.get(f"{strict.url}/health").status_code == 200
    with openai.OpenAI(base_url=f"{strict.url}/v1", api_key="secret") as client:
        assert client.models.list().data[0].id == "mine"
    client = openai.OpenAI(base_url=f"{strict.url}/v1", api_key="no", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_too_many_choices(strict: Server) -> None:
    """A request for more choices than ``server.max_queued`` allows can never be served."""
    with httpx.Client(base_url=strict.url, headers={"authorization": "Bearer secret"}, timeout=60) as http:
        error = error_of(http.post(PLAIN, json={"prompt": "a", "n": 5, "max_tokens": 1}), 400)
        assert error["param"] == "n"
        assert "server.max_choices" in error["message"]
        error = error_of(http.post(PLAIN, json={"prompt": ["a"] * 5, "max_tokens": 1}), 400)
        assert error["param"] == "prompt"


def test_too_many_open_requests(strict: Server) -> None:
    with httpx.Client(base_url=strict.url, headers={"authorization": "Bearer secret"}, timeout=60) as http:
        body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True}
        with contextlib.ExitStack() as stack:
            lines = [stack.enter_context(http.stream("POST", PLAIN, json=body)).iter_lines() for _ in range(4)]
            for each in lines:
                next(each)
            refused = http.post(PLAIN, json={"prompt": "a", "max_tokens": 1})
            assert error_of(refused, 503)["code"] == "overloaded"
            assert refused.headers["retry-after"] == "1"
            assert http.get("/health").status_code == 200
        for _ in range(100):  # the disconnected client's requests are aborted soon, and then a new request is accepted
            if (answer := http.post(PLAIN, json={"prompt": "a", "max_tokens": 1})).status_code == 200:
                break
        assert answer.status_code == 200


def test_model_without_tokenizer(tiny: Path, tmp_path: Path) -> None:
    """A model without a tokenizer serves prompts of token ids, and refuses whatever needs text."""
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(tiny / name)
    server = Server(f"model={tmp_path}", "num_pages=64", "max_seq_len=512")
    with server, httpx.Client(base_url=server.url, timeout=60) as http:
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
        (choice,) = http.post(PLAIN, json=body).json()["choices"]
        assert (len(choice["token_ids"]), choice["text"]) == (4, "")
        assert error_of(http.post(PLAIN, json={"prompt": "Hi"}), 400)["param"] == "prompt"
        assert error_of(http.post(PLAIN, json={**body, "stop": "x"}), 400)["param"] == "stop"
        assert error_of(http.post(CHAT, json={"messages": USER}), 400)["param"] == "messages"
        assert error_of(http.post("/tokenize", json={"prompt": "Hi"}), 400)["param"] == "prompt"
        assert error_of(http.post("/detokenize", json={"tokens": [1]}), 400)["param"] == "tokens"
        streamed = http.post(PLAIN, json={**body, "stream": True}).text
        pieces = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        assert [i for piece in pieces for c in piece["choices"] for i in c["token_ids"]] == choice["token_ids"]
