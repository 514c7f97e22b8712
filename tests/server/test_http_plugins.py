"""The extensions of the API server: it works without any one of them, and a plugin can add an API of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import APIRouter, Request, Response

from minisgl.config import Config, ConfigError
from minisgl.core import SamplingParams
from minisgl.message import TextPrompt
from minisgl.plugins.http import HttpConfig
from minisgl.server import extension
from minisgl.server.app import Api
from minisgl.server.errors import ApiError
from minisgl.server.extension import HttpExtension, check_options, load_extensions, shipped
from minisgl.server.generate import Choice, Json, ResponseBuilder
from minisgl.server.request_record import record_of
from minisgl.testing.serving import Server

pytestmark = pytest.mark.xdist_group("tutor")  # one process: the server starts once

RunApp = Callable[..., None]
CHAT = {"messages": [{"role": "user", "content": "What is a page table?"}], "max_tokens": 8, "temperature": 0}


def streamed_text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1])


@pytest.mark.parametrize("deleted", shipped())
def test_any_extension_may_be_deleted(run_app: RunApp, monkeypatch: pytest.MonkeyPatch, deleted: str) -> None:
    """Without the file of one extension, the server answers a chat, and the options of the extension are refused."""
    rest = [name for name in shipped() if name != deleted]
    monkeypatch.setattr(extension, "shipped", lambda: rest)
    monkeypatch.setitem(sys.modules, f"minisgl.plugins.http.{deleted}", None)  # an import of it fails

    async def test(server: Any) -> None:
        async with server.client() as client:
            assert streamed_text(await client.post("/v1/chat/completions", json={**CHAT, "stream": True})) == "ab"
            metrics = await client.get("/metrics")
            assert ("minisgl_open_requests 0.0" in metrics.text) == (deleted != "metrics")

    run_app(test)


def test_a_server_without_extensions_answers_as_before(tutor: Server) -> None:
    with Server("model=tutor", "num_pages=512", "server.extensions=[]") as bare:
        texts = []
        for url in (tutor.url, bare.url):
            texts.append(streamed_text(httpx.post(f"{url}/v1/chat/completions", json={**CHAT, "stream": True})))
            full = httpx.post(f"{url}/v1/chat/completions", json=CHAT).json()
            assert full["choices"][0]["message"]["content"] == texts[-1]
        assert texts[0] == texts[1] != ""
        assert httpx.get(f"{bare.url}/health").status_code == 200
        assert httpx.post(f"{bare.url}/tokenize", json={"prompt": "x"}).status_code == 404


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["server.extensions=[shares,nonsense]"], "there is no extension 'nonsense'. Known: about, access"),
        (["server.extensions=[]", "server.max_choices=7"], "server.max_choices=7: the extension with this option"),
    ],
)
def test_wrong_options(options: list[str], message: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "minisgl", "model=tutor", "server.port=0", *options],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 2
    assert message in ran.stderr


def test_options_of_a_deleted_extension_are_refused() -> None:
    """A server that can't speak HTTPS does not speak HTTP in its place."""
    loaded = load_extensions(Config(), names=[name for name in shipped() if name != "tls"])
    check_options(HttpConfig(max_queued=7, io_timeout=1.0), loaded)
    with pytest.raises(ConfigError, match=r"server\.tls_cert=x\.pem: .*not loaded"):
        check_options(HttpConfig(tls_cert="x.pem"), loaded)


# ---- an API of a plugin ------------------------------------------------------------------------------------------


class Ask(msgspec.Struct):
    question: str
    stream: bool = False


class AskBuilder(ResponseBuilder):
    """Another format: events with names, and an object with one text."""

    def full(self, choices: Any) -> dict[str, Any]:
        return {"answer": "".join(choice.text for choice in choices)}

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        return None

    def chunk(self, choice: Choice) -> dict[str, Any]:
        return {"said": choice.text}

    def error(self, error: ApiError) -> dict[str, Any]:
        return {"wrong": error.message}

    def encode(self, events: Any) -> bytes:
        return b"".join(b"event: x\ndata: %b\n\n" % msgspec.json.encode(event) for event in events if event)

    def end(self, ends: Any) -> bytes:
        return b"event: end\n\n"


class AskApi(HttpExtension):
    def add_routes(self, router: APIRouter, api: Api) -> None:
        @router.post("/ask")
        async def ask(request: Request) -> Response:
            try:
                body, prompt = await api.read(request, Ask, lambda body: TextPrompt(body.question))
                builder = AskBuilder(model=api.model)
                return await api.generate(
                    request, [prompt], SamplingParams(max_tokens=5), builder, stream_output=body.stream
                )
            except ApiError as error:
                record_of(request.scope).error = error.message
                return Json({"wrong": error.message}, error.status)


def test_an_api_with_its_own_format(run_app: RunApp) -> None:
    async def test(server: Any) -> None:
        async with server.client() as client:
            assert (await client.post("/ask", json={"question": "x"})).json() == {"answer": "ab"}
            stream = await client.post("/ask", json={"question": "x", "stream": True})
            assert stream.text.count('event: x\ndata: {"said":') >= 1
            assert stream.text.endswith("event: end\n\n")
            wrong = await client.post("/ask", json={"answer": "x"})
            assert wrong.status_code == 400
            assert "answer" in wrong.json()["wrong"]

    run_app(test, extensions=[AskApi()])
