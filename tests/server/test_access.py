"""Who may use the server: the key, web pages of other sites, and what the headers say of the body."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from minisgl.plugins.http.apis.completion import CompletionRequest
from minisgl.plugins.http.apis.parameters import FullChatRequest
from minisgl.server.app import is_authorized
from minisgl.server.errors import ApiError
from minisgl.utils.process import is_loopback

from .conftest import AppServer, parse
from .test_errors import error_of

PLAIN = "/v1/completions"
BODY = {"model": "m", "prompt": "x", "max_tokens": 1}
RunApp = Callable[..., None]


# ---- the key ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["Bearer k", "bearer k", "BEARER k", "bEaReR  k "])
def test_scheme_has_any_case(given: str) -> None:
    assert is_authorized(given, "k")


@pytest.mark.parametrize("given", ["", "k", "Bearer", "Bearer K", "Bearer k k", "Basic k", "Bearerk", "Bearer\tk"])
def test_wrong_key(given: str) -> None:
    assert not is_authorized(given, "k")
    assert is_authorized(given, None)


def test_key_beyond_ascii() -> None:
    """A client sends the bytes of UTF-8, and an ASGI server decodes them as Latin-1."""
    assert is_authorized("bearer " + "ü".encode().decode("latin-1"), "ü")
    assert not is_authorized("bearer ü", "ü")


# ---- web pages -------------------------------------------------------------------------------------------------------

ALLOWED = [
    ("127.0.0.1:1919", None),
    ("x", None),
    ("[::1]:1919", None),
    ("localhost:1919", "http://localhost:1919"),
    ("chat.localhost", "http://chat.localhost"),
    ("127.0.0.1:1919", "http://127.0.0.1:1919"),
    ("127.0.0.1:1919", "HTTP://127.0.0.1:1919"),
    ("127.0.0.1", "http://127.0.0.1:80"),
    ("llm.example.com", None),
    ("LLM.example.com.:443", "https://llm.example.com"),
    ("127.0.0.1:1919", "https://chat.example.com"),
    ("", None),
]
REFUSED = [
    ("evil.example", None, "server.allowed_hosts"),
    ("evil.example:1919", "http://evil.example:1919", "server.allowed_hosts"),
    ("llm.example.com.evil.example", None, "server.allowed_hosts"),
    ("127.0.0.1.evil.example", None, "server.allowed_hosts"),
    ("127.0.0.1:1919", "http://evil.example", "server.cors_origins"),
    ("127.0.0.1:1919", "http://127.0.0.1:8000", "server.cors_origins"),
    ("127.0.0.1:1919", "https://chat.example.com.evil.example", "server.cors_origins"),
    ("127.0.0.1:1919", "null", "server.cors_origins"),
    ("127.0.0.1:1919", "", "server.cors_origins"),
    ("", "http://", "server.cors_origins"),
]
SETTINGS: dict[str, Any] = {"allowed_hosts": ("llm.example.com",), "cors_origins": ("https://chat.example.com",)}


def headers_of(host: str, origin: str | None) -> dict[str, str]:
    return {"host": host, **({} if origin is None else {"origin": origin})}


def test_allowed_pages(run_app: RunApp) -> None:
    async def test(server: AppServer) -> None:
        async with server.client() as client:
            for host, origin in ALLOWED:
                answer = await client.post(PLAIN, json=BODY, headers=headers_of(host, origin))
                assert answer.status_code == 200, (host, origin, answer.text)

    run_app(test, **SETTINGS)


def test_promise_2_pages_of_other_sites_are_refused(run_app: RunApp) -> None:
    """The error names the option that would allow the page, and nothing is sent to another process."""

    async def test(server: AppServer) -> None:
        async with server.client() as client:
            for host, origin, option in REFUSED:
                for kind in ("application/json", "text/plain"):
                    headers = {**headers_of(host, origin), "content-type": kind}
                    answer = await client.post(PLAIN, json=BODY, headers=headers)
                    assert option in error_of(answer, 403)["message"], (host, origin)
                    assert answer.headers["x-request-id"]
        assert server.submitted == []

    run_app(test, **SETTINGS)


def test_pages_may_not_read_through_another_name(run_app: RunApp) -> None:
    """A GET request has no Origin, so only its Host shows that the page's name was bound to the server's address."""

    async def test(server: AppServer) -> None:
        async with server.client() as client:
            error_of(await client.get("/v1/models", headers={"host": "evil.example"}), 403)
            assert (await client.get("/v1/models", headers={"origin": "http://evil.example"})).status_code == 200

    run_app(test, **SETTINGS)


@pytest.mark.parametrize("settings", [{"allowed_hosts": ("*",), "cors_origins": ("*",)}, {"api_key": "k"}])
def test_all_pages_are_allowed(run_app: RunApp, settings: dict[str, Any]) -> None:
    """With a key, a page must send it; `*` allows all pages."""

    async def test(server: AppServer) -> None:
        async with server.client(headers={"authorization": "Bearer k"}) as client:
            for host, origin, _ in REFUSED:
                headers = headers_of(host, origin)
                assert (await client.post(PLAIN, json=BODY, headers=headers)).status_code == 200

    run_app(test, **settings)


def test_hosts_are_not_checked_by_a_public_server(run_app: RunApp) -> None:
    async def test(server: AppServer) -> None:
        async with server.client() as client:
            for origin in (None, "https://llm.example.org"):
                headers = headers_of("llm.example.org", origin)
                assert (await client.post(PLAIN, json=BODY, headers=headers)).status_code == 200

    run_app(test, host="0.0.0.0")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.1", False), ("llm.example.com", False)],
)  # fmt: skip
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected


# ---- the body --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "application/json",
        "APPLICATION/JSON",
        "application/json; charset=utf-8",
        'application/json;charset="UTF-8"',
    ],
)
def test_json_bodies(run_app: RunApp, kind: str | None) -> None:
    async def test(server: AppServer) -> None:
        async with server.client() as client:
            headers = {} if kind is None else {"content-type": kind}
            for body in (b'{"prompt":"x"}', b'\xef\xbb\xbf{"prompt":"x"}'):
                assert (await client.post(PLAIN, content=body, headers=headers)).status_code == 200

    run_app(test)


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("content-type", "text/plain", 415),
        ("content-type", "application/x-www-form-urlencoded", 415),
        ("content-type", "multipart/form-data; boundary=x", 415),
        ("content-type", "application/json; charset=utf-16", 415),
        ("content-type", "application/jsonx", 415),
        ("content-type", "", 415),
        ("content-encoding", "gzip", 415),
        ("content-encoding", "identity, br", 415),
        ("transfer-encoding", "gzip, chunked", 501),
    ],
)
def test_other_bodies_are_refused(run_app: RunApp, name: str, value: str, status: int) -> None:
    """The error names what was given, on each route that reads a body, and the body is not read."""

    async def test(server: AppServer) -> None:
        async with server.client() as client:
            for path in (PLAIN, "/v1/chat/completions", "/tokenize", "/detokenize"):
                headers = {"content-type": "application/json", name: value}
                answer = await client.post(path, content=gzip.compress(b"{}"), headers=headers)
                assert repr(value) in error_of(answer, status)["message"]
                if name == "content-encoding":
                    assert answer.headers["accept-encoding"] == "identity"
                if name == "content-type":
                    assert "Content-Type: application/json" in answer.text
        assert server.submitted == []

    run_app(test)


@pytest.mark.parametrize("number", ["1e999", "-1e400", "9" * 400 + ".0"])
@pytest.mark.parametrize("form", ['"temperature":N', '"logit_bias":{"5": N }', '"stop_token_ids":[1, N]', '"other":N'])
def test_numbers_that_json_does_not_have(number: str, form: str) -> None:
    with pytest.raises(ApiError, match=r"out of range|unsupported|Unrecognized") as error:
        parse(f'{{"prompt":"a NaN, b",{form.replace("N", number)}}}'.encode(), CompletionRequest)
    name = form.split('"')[1]
    assert (error.value.status, error.value.param) == (400, name)
    assert name in error.value.message


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_values_that_are_no_numbers(number: str) -> None:
    with pytest.raises(ApiError, match="not valid JSON") as error:
        parse(f'{{"prompt":"a","temperature":{number}}}'.encode(), CompletionRequest)
    assert error.value.status == 400


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"prompt":"x"}'.encode("utf-16"), "not valid JSON"),
        ('{"prompt":"x"}'.encode("utf-32-le"), "not valid JSON"),
        (b'{"prompt":"\xff"}', "not valid JSON"),
        (b'{"prompt":"\\ud83d"}', "not valid JSON"),
        (b"[1]", "Expected `object`"),
        (b'{"prompt":"a, NaN, b",}', "trailing comma"),
        (b"prompt=x", "not valid JSON"),
        (b"{" + b",".join(b'"a%d":null' % i for i in range(300)) + b"}", "more than 256 parameters"),
    ],
)
def test_bodies_that_are_not_json(body: bytes, message: str) -> None:
    with pytest.raises(ApiError, match=message) as error:
        parse(body, CompletionRequest)
    assert error.value.status == 400


def test_empty_role_is_passed_on() -> None:
    """The tokenizer refuses it as it refuses each unknown role: it is not left out, as an absent name is."""
    body = parse(b'{"messages":[{"role":"","content":"x"}]}', FullChatRequest)
    assert body.to_prompt().messages == [{"role": "", "content": "x"}]


def test_empty_role_is_refused(tutor: Any) -> None:
    body = {"messages": [{"role": "", "content": "x"}], "max_tokens": 1}
    error = error_of(httpx.post(f"{tutor.url}/v1/chat/completions", json=body, timeout=60), 400)
    assert error["param"] == "messages"
    assert "role" in error["message"]
