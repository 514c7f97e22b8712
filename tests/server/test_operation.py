"""Request ids, the access log, time-outs, CORS, the root path and HEAD: the application without worker processes."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.responses import Response

from minisgl.config import Config, ConfigError
from minisgl.plugins.http import HttpConfig
from minisgl.plugins.http.connections import uvicorn_options
from minisgl.plugins.http.records import Records, request_id
from minisgl.plugins.http.timeout import Timeout
from minisgl.plugins.observer.json_lines import JsonFormatter
from minisgl.server.app import wrapped
from minisgl.server.extension import HttpExtension
from minisgl.server.request_record import RequestRecord, Stream
from minisgl.utils.log import TextFormatter

from .conftest import OnEnd

RunApp = Callable[..., None]
BODY = {"prompt": [5, 6, 7], "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


# ---- request ids -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["a", "0f-9_X", "x" * 128, "a:b/c+d=e@f.g"])
def test_request_id_of_the_client(given: str) -> None:
    assert request_id(given) == given


@pytest.mark.parametrize("given", [None, "", "x" * 129, "a b", "a\nb", "a\x1b[2J", 'a"b', "ü"])
def test_unusable_request_id_is_replaced(given: str | None) -> None:
    made = request_id(given)
    assert len(made) == 32
    assert made != request_id(given)


def test_every_response_has_the_request_id(run_app: RunApp) -> None:
    """Also the responses that are not made by a route: 404, 405, 413, 400 and 500."""

    async def test(server: Any) -> None:
        headers = {"X-Request-Id": "abc-1"}
        async with server.client(headers=headers) as client:
            replies = [
                await client.get("/health"),
                await client.get("/nothing"),
                await client.get("/v1/completions"),
                await client.post("/v1/completions", content=b"{"),
                await client.post("/v1/completions", content=b" " * 600),
                await client.post("/v1/completions", json=BODY),
                await client.post("/v1/completions", json={**BODY, "stream": True}),
                await client.post("/v1/chat/completions", json=CHAT),
            ]
            server.dispatcher.check_open = None  # a bug in a route
            replies.append(await client.get("/health"))
        assert [reply.status_code for reply in replies] == [200, 404, 405, 400, 413, 200, 200, 200, 500]
        assert {reply.headers.get("x-request-id") for reply in replies} == {"abc-1"}
        assert replies[5].json()["id"] == "cmpl-abc-1"
        assert replies[7].json()["id"] == "chatcmpl-abc-1"
        chunks = [json.loads(line[6:]) for line in replies[6].text.splitlines() if line.startswith("data: {")]
        assert {chunk["id"] for chunk in chunks} == {"cmpl-abc-1"}

    run_app(test, max_body=500)


def test_request_id_is_made(run_app: RunApp) -> None:
    async def test(server: Any) -> None:
        async with server.client() as client:
            first = await client.post("/v1/completions", json=BODY)
            second = await client.get("/health")
        assert first.json()["id"] == f"cmpl-{first.headers['x-request-id']}"
        assert first.headers["x-request-id"] != second.headers["x-request-id"]

    run_app(test)


# ---- errors in the server ----------------------------------------------------------------------------------


def test_connection_is_closed_after_a_500(run_app: RunApp, caplog: pytest.LogCaptureFixture) -> None:
    """The traceback is logged once, with the request's id, and the 500 is counted."""

    async def test(server: Any) -> None:
        server.dispatcher.check_open = None
        async with server.client() as client:
            reply = await client.get("/health", headers={"X-Request-Id": "broken"})
            assert (reply.status_code, reply.headers["connection"]) == (500, "close")
            assert reply.json()["error"]["type"] == "server_error"
            good = await client.get("/metrics")
        assert "connection" not in good.headers
        assert 'minisgl_http_requests_total{route="/health",status="500"} 1.0' in good.text

    run_app(test)
    (failure,) = [record for record in caplog.records if record.exc_info]
    assert json.loads(JsonFormatter("api").format(failure))["request_id"] == "broken"
    assert "a request failed request_id='broken'\nTraceback" in TextFormatter("api").format(failure)


class Listener:
    """An `AppServer`'s application behind the server's HTTP code, on a port of its own."""

    def __init__(self, app: Any):
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        options = uvicorn_options(100, 30.0)
        self._server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, **options))

    async def __aenter__(self) -> Listener:
        self._task = asyncio.create_task(self._server._serve([self._socket]))
        while not self._server.started:
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = True
        await self._task
        self._socket.close()

    async def answer(self, sent: bytes) -> bytes:
        """Send bytes, and return all that the server sends until it closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(sent)
        reply = await reader.read(-1)
        writer.close()
        return reply


GET = b"GET %s HTTP/1.1\r\nhost: x\r\nx-request-id: r-%d\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def test_500_ends_the_connection(run_app: RunApp) -> None:
    """The request behind one that failed is not answered on the same connection."""

    async def test(server: Any) -> None:
        async with Listener(server.app) as listener:
            good = await listener.answer(GET % (b"/health", 1) + GET % (b"/nothing", 2) + LAST)
            assert [good.count(b"HTTP/1.1 %d " % status) for status in (200, 404)] == [2, 1]
            assert b"x-request-id: r-1\r\n" in good
            assert b"x-request-id: r-2\r\n" in good
            server.dispatcher.check_open = None
            reply = await listener.answer(GET % (b"/health", 3) + GET % (b"/metrics", 4))
        assert reply.startswith(b"HTTP/1.1 500 ")
        assert reply.count(b"HTTP/1.1") == 1
        assert b"x-request-id: r-3\r\n" in reply
        assert b"connection: close\r\n" in reply

    run_app(test)


def test_head_has_no_body(run_app: RunApp) -> None:
    async def test(server: Any) -> None:
        async with Listener(server.app) as listener:
            reply = await listener.answer(LAST.replace(b"GET", b"HEAD"))
        assert reply.startswith(b"HTTP/1.1 200 ")
        assert b"content-length: 15\r\n" in reply
        assert reply.endswith(b"\r\n\r\n")

    run_app(test)


def test_client_behind_a_proxy(run_app: RunApp, caplog: pytest.LogCaptureFixture) -> None:
    """A proxy on the same machine names the client. What it sends is bounded, and adds no line to the log."""
    caplog.set_level(logging.DEBUG, "minisgl")

    async def test(server: Any) -> None:
        async with Listener(server.app) as listener:
            for client in (b"203.0.113.9", b"\x85" + b"x" * 1000):
                await listener.answer(LAST.replace(b"host: x", b"host: x\r\nx-forwarded-for: " + client))

    run_app(test)
    first, second = logged(caplog)
    assert first["client"] == "203.0.113.9"
    assert len(second["client"]) <= 100
    assert all(TextFormatter("api").format(r).isprintable() for r in caplog.records if r.name == "minisgl.access")


def test_error_after_the_response_began(caplog: pytest.LogCaptureFixture) -> None:
    """The middleware logs the error; the HTTP server closes the connection of the incomplete response."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("late")

    async def send(message: Any) -> None:
        sent.append(message)

    ended: list[RequestRecord] = []
    scope = {"type": "http", "method": "GET", "path": "/x", "headers": [], "client": None}
    asyncio.run(wrapped(app, [OnEnd(ended.append), Records()])(scope, None, send))  # type: ignore[arg-type]
    assert [message["type"] for message in sent] == ["http.response.start"]
    assert (ended[0].status, ended[0].error) == (200, "RuntimeError")
    assert "late" in caplog.text


def test_refusals_of_other_extensions_have_an_id() -> None:
    """The record's middleware is around theirs, whatever the order of the extensions."""
    sent: list[Any] = []

    class Refuses(HttpExtension):
        def wrap(self, app: Any) -> Any:
            return Response(status_code=403)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/x", "headers": [(b"x-request-id", b"r-1")], "client": None}
    asyncio.run(wrapped(Response(), [Records(), Refuses()])(scope, None, send))  # type: ignore[arg-type]
    assert (sent[0]["status"], dict(sent[0]["headers"])[b"x-request-id"]) == (403, b"r-1")


# ---- the access log ----------------------------------------------------------------------------------------


def logged(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Return the lines of the access log, in JSON format."""
    formatter = JsonFormatter("api")
    return [json.loads(formatter.format(record)) for record in caplog.records if record.name == "minisgl.access"]


def test_access_log(run_app: RunApp, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "minisgl")

    async def test(server: Any) -> None:
        async with server.client(headers={"X-Request-Id": "r1"}) as client:
            await client.post("/v1/completions?secret=1", json={**BODY, "n": 2})
            await client.post("/v1/completions", json={**BODY, "stream": True})
            await client.post("/v1/completions", json={**BODY, "n": 0})
            await client.get("/health")

    run_app(test)
    full, stream, refused = logged(caplog)
    assert (full["request_id"], full["method"], full["path"], full["status"]) == ("r1", "POST", "/v1/completions", 200)
    assert (full["prompt_tokens"], full["output_tokens"], full["finish_reasons"]) == (3, 4, ["length"])
    assert (full["uid"], full["choices"]) == (1, 2)
    assert 0 < full["first_token_seconds"] <= full["seconds"]
    assert (stream["prompt_tokens"], stream["output_tokens"], stream["uid"]) == (3, 2, 3)
    assert refused["status"] == 400
    assert refused["error"] == "n must be between 1 and 128, got 0."
    assert "secret" not in caplog.text
    assert full["message"].startswith("POST /v1/completions 200 in 0.")
    text = TextFormatter("api").format(next(r for r in caplog.records if r.name == "minisgl.access"))
    assert " api minisgl.access: POST /v1/completions 200 in 0." in text
    assert " request_id='r1' client='127.0.0.1' uid=" in text  # method, path, status and seconds are said once
    assert " prompt_tokens=3 output_tokens=4 finish_reasons=['length'] first_token_seconds=0." in text


def test_client_adds_no_line_to_the_log(run_app: RunApp, caplog: pytest.LogCaptureFixture) -> None:
    """Neither a path nor a request id nor an error message contains a line break or an escape character."""
    caplog.set_level(logging.DEBUG, "minisgl")

    async def test(server: Any) -> None:
        async with server.client() as client:
            await client.get("/a%0Ab%1B%5B2J%E2%80%A8")
            await client.get("/v1/models/a%0Ab%1B%5B2J%E2%80%A8c%7F")
            await client.post("/v1/completions", json={**BODY, "model": "a\nb\x1b[2J\u2028"})

    run_app(test)
    assert len(logged(caplog)) == 3
    for record in caplog.records:
        if record.name == "minisgl.access":
            assert TextFormatter("api").format(record).isprintable()


def test_probes_are_logged_at_debug_level(run_app: RunApp, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "minisgl")

    async def test(server: Any) -> None:
        async with server.client() as client:
            await client.get("/health")
            server.dispatcher.state = "draining"
            await client.get("/ready")

    run_app(test)
    assert [(line["path"], line["level"]) for line in logged(caplog)] == [("/health", "debug"), ("/ready", "info")]


def test_disconnect_is_logged(run_app: RunApp, caplog: pytest.LogCaptureFixture) -> None:
    """A client that goes away during a stream: the status was sent as 200, and the line says what happened."""
    caplog.set_level(logging.INFO, "minisgl")

    async def test(server: Any) -> None:
        gone = asyncio.Event()
        requests = [{"type": "http.request", "body": json.dumps({**BODY, "stream": True}).encode()}]

        async def receive() -> Any:
            if requests:
                return requests.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                gone.set()

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        await server.app({**scope, "client": ("::1", 5), "raw_path": b"/v1/completions"}, receive, send)
        while not server.aborted:
            await asyncio.sleep(0.01)
        async with server.client() as client:
            text = (await client.get("/metrics")).text
        assert 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"} 1.0' in text

    run_app(test, silent=True)
    (line,) = logged(caplog)
    assert (line["status"], line["error"], line["finish_reasons"]) == (200, "The client disconnected.", ["abort"])
    assert line["prompt_tokens"] is None


# ---- time-outs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [BODY, {**BODY, "n": 3}])
def test_request_timeout(run_app: RunApp, body: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "minisgl")

    async def test(server: Any) -> None:
        async with server.client() as client:
            reply = await client.post("/v1/completions", json=body)
            while len(server.aborted) < body.get("n", 1):
                await asyncio.sleep(0.01)
        assert reply.status_code == 504
        message = "The request took longer than 1 s (server.request_timeout)."
        assert reply.json()["error"] == {"message": message, "type": "server_error", "param": None, "code": None}
        assert sorted(server.aborted) == server.submitted[0].uids
        assert server.dispatcher.num_open == 0

    run_app(test, silent=True, request_timeout=1.0)
    (line,) = logged(caplog)
    assert (line["status"], line["prompt_tokens"], line["finish_reasons"]) == (504, None, ["error"])
    assert line["error"].endswith("(server.request_timeout).")


def test_request_timeout_in_a_stream(run_app: RunApp) -> None:
    """The response has begun, so an error is its last event."""

    async def test(server: Any) -> None:
        async with server.client() as client:
            reply = await client.post("/v1/completions", json={**BODY, "stream": True})
            while not server.aborted:
                await asyncio.sleep(0.01)
        events = [line[6:] for line in reply.text.splitlines() if line]
        assert reply.status_code == 200
        assert "server.request_timeout" in json.loads(events[-1])["error"]["message"]
        assert server.dispatcher.num_open == 0

    run_app(test, silent=True, request_timeout=1.0)


@pytest.mark.parametrize("route", ["/tokenize", "/detokenize"])
def test_request_timeout_of_queries(run_app: RunApp, route: str) -> None:
    async def test(server: Any) -> None:
        async with server.client() as client:
            body = {"prompt": "x"} if route == "/tokenize" else {"tokens": [1]}
            reply = await client.post(route, json=body)
        assert reply.status_code == 504

    run_app(test, silent=True, request_timeout=1.0)


def test_timer_of_a_fast_request_is_cancelled(run_app: RunApp, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[RequestRecord] = []
    timers: list[asyncio.TimerHandle] = []
    watch = Timeout.watch

    def keep(self: Timeout, stream: Stream) -> None:
        watch(self, stream)
        timers.append(self.timers[stream])

    monkeypatch.setattr(Timeout, "watch", keep)

    async def test(server: Any) -> None:
        async with server.client() as client:
            reply = await client.post("/v1/completions", json=BODY)
        assert reply.json()["choices"][0]["text"] == "ab"

    run_app(test, request_timeout=5000.0, on_end=[ended.append])
    assert ended[0].stream is not None
    (timer,) = timers
    assert timer.cancelled()


# ---- CORS, root path, HEAD ---------------------------------------------------------------------------------


def test_cors(run_app: RunApp) -> None:
    async def test(server: Any) -> None:
        async with server.client() as client:
            ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
            allowed = {"Origin": "https://a.example"}
            preflight = await client.options("/v1/completions", headers={**allowed, **ask})
            reply = await client.post("/v1/completions", json=BODY, headers={**allowed, "Authorization": "Bearer k"})
            error = await client.get("/v1/models", headers=allowed)
            other = await client.get("/health", headers={"Origin": "https://b.example"})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        assert preflight.headers["access-control-allow-headers"] == "authorization"
        assert reply.status_code == 200
        assert reply.headers["access-control-expose-headers"] == "X-Request-Id"
        assert (error.status_code, error.headers["access-control-allow-origin"]) == (401, "https://a.example")
        assert "access-control-allow-origin" not in other.headers

    run_app(test, cors_origins=("https://a.example",), api_key="k")


def test_no_cors_by_default(run_app: RunApp) -> None:
    async def test(server: Any) -> None:
        async with server.client() as client:
            reply = await client.get("/health", headers={"Origin": "https://a.example"})
        assert not [name for name in reply.headers if name.startswith("access-control")]

    run_app(test)


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_root_path(run_app: RunApp, prefix: str) -> None:
    """The proxy may remove the prefix or leave it."""

    async def test(server: Any) -> None:
        async with server.client() as client:
            statuses = [
                (await client.get(f"{prefix}/health")).status_code,
                (await client.post(f"{prefix}/v1/completions", json=BODY)).status_code,
                (await client.get(f"{prefix}/nothing")).status_code,
            ]
            metrics = (await client.get(f"{prefix}/metrics")).text
        assert statuses == [200, 200, 404]
        assert 'minisgl_http_requests_total{route="/v1/completions",status="200"} 1.0' in metrics

    run_app(test, root_path="/llm")


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models", "/v1/models/m"])
def test_head(run_app: RunApp, path: str) -> None:
    async def test(server: Any) -> None:
        async with server.client() as client:
            head, get = await client.head(path), await client.get(path)
        assert head.status_code == get.status_code == 200
        assert head.headers["content-type"] == get.headers["content-type"]

    run_app(test)


# ---- options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("request_timeout", 0.0),
        ("request_timeout", -1.0),
        ("request_timeout", float("nan")),
        ("root_path", "llm"),
        ("root_path", "/llm/"),
        ("root_path", "/"),
        ("cors_origins", ["https://a.example/"]),
        ("cors_origins", ["a.example"]),
        ("tls_cert", ""),
        ("tls_key", "key.pem"),
    ],
)
def test_wrong_options(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"server.{option}"):
        Config(server=HttpConfig(**{option: value})).check()


def test_right_options() -> None:
    origins = ["*", "https://a.example:8443", "http://localhost"]
    Config(server=HttpConfig(request_timeout=5.0, root_path="/a/b-c", cors_origins=origins)).check()


def test_unknown_exceptions_are_no_secret(run_app: RunApp) -> None:
    """A 500 names the exception's class and not its message."""

    async def test(server: Any) -> None:
        async with server.client() as client:
            server.dispatcher.submit = None
            reply: httpx.Response = await client.post("/v1/completions", json=BODY)
        assert reply.json()["error"]["message"] == "The server failed: TypeError."

    run_app(test)
