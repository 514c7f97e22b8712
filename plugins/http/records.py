"""Records of HTTP requests: the id of each, which every response has, and what the HTTP server knows of it.

The record of a request, with the status and the error of its response, is for the extensions that observe
(`HttpExtension.on_end`): the access log, the metrics, the traces.
"""

from __future__ import annotations

import logging
import re
import uuid
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.sampling_params import shorten
from minisgl.server.extension import HttpExtension
from minisgl.server.request_record import record_of

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


@hookimpl
def minisgl_http(config: Config) -> HttpExtension:
    return Records()


class Records(HttpExtension):
    """Fills in the record of each request. It surrounds the other extensions, so it sees every response."""

    is_outermost = True

    def wrap(self, app: ASGIApp) -> ASGIApp:
        return RecordMiddleware(app)


def request_id(given: str | None) -> str:
    """Return the request id that the client gave, or a new one if the client gave none that can be used.

    An id has 1 to 128 letters, digits and characters of ``._:/+=@-``, so that it can't add a line to a log.
    """
    return given if given is not None and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


class RecordMiddleware:
    """ASGI middleware around all others.

    The response gets the header ``X-Request-Id``. After a 500 it gets ``Connection: close`` too: a request failed in a
    way that the server does not know, so no other request should use its connection.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = record_of(scope)
        record.headers = Headers(scope=scope)
        record.id = request_id(record.headers.get("x-request-id"))
        record.method, record.path = shorten(scope["method"], 20), shorten(quote(scope["path"]))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                added = [(b"x-request-id", record.id.encode())]
                if record.status == 500:
                    added.append((b"connection", b"close"))
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            record.error = type(error).__name__
            log.exception("a request failed", extra={"fields": {"request_id": record.id}})
            if not record.status:
                raise
            # The response has begun. If it is not complete, the HTTP server closes the connection.
        finally:
            record.route = getattr(scope.get("route"), "path", "unknown")
            stream = record.stream
            if stream is not None:
                disconnected = "The client disconnected." if None in stream.ends else ""
                record.error = record.error or stream.error or disconnected
