"""The size of a request's body: a larger one than ``server.max_body`` gets HTTP status 413, before it is all read."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.plugins.http import HttpConfig
from minisgl.server.app import Api
from minisgl.server.errors import ApiError
from minisgl.server.extension import HttpExtension


@hookimpl
def minisgl_http(config: Config) -> HttpExtension:
    return BodySize(config.server)


class BodySize(HttpExtension):
    """Counts the bytes of each body while a route reads it."""

    options = ("max_body",)

    def __init__(self, server: HttpConfig):
        self._server, self._limit = server, server.body_limit(0)

    def begin(self, api: Api) -> None:
        self._limit = self._server.body_limit(api.dispatcher.max_seq_len)

    def wrap(self, app: ASGIApp) -> ASGIApp:
        async def limited(scope: Scope, receive: Receive, send: Send) -> None:
            await app(scope, counted(scope, receive, self._limit) if scope["type"] == "http" else receive, send)

        return limited


def counted(scope: Scope, receive: Receive, limit: int) -> Receive:
    """Return a function that receives the body, and raises `ApiError` (413) where it gets larger than ``limit`` bytes.

    Nothing is received of a body whose announced length is larger.
    """
    announced = Headers(scope=scope).get("content-length", "")
    is_number = announced.isascii() and announced.isdigit()
    size = 0 if not is_number else limit + 1 if len(announced) > 18 else int(announced)
    if size <= limit:
        size = 0

    async def receive_and_count() -> Message:
        nonlocal size
        if size <= limit:
            message = await receive()
            size += len(message.get("body", b""))
        if size > limit:
            raise ApiError(413, f"The body is larger than {limit} bytes (server.max_body).", code="request_too_large")
        return message

    return receive_and_count
