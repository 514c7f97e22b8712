"""The outermost ASGI application: it gives every request an id, and logs and counts its response.

It surrounds the routes and their error handlers, so it sees every response that is made from a parsed request, also
that to an unknown URL and that after an error in a route.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.server.request_record import RequestRecord

log = logging.getLogger(__name__)
access_log = logging.getLogger("minisgl.access")

_PROBES = frozenset({"/health", "/ready", "/metrics", "/get_load", "/v1/loads"})
"""Routes that other programs ask for every few seconds. They are logged at debug level if all is well."""
_IN_LINE = ("method", "path", "status", "seconds")
"""The fields that the line of the access log contains as text. A log of text lines does not repeat them."""


class RequestMiddleware:
    """ASGI middleware around all others.

    The response gets the header ``X-Request-Id``. After a 500 it gets ``Connection: close`` too: a request failed in a
    way that the server does not know, so no other request should use its connection. Each function of ``on_end`` is
    called with the record of a request whose response has ended. ``root_path`` is a prefix that the paths of requests
    may have, without a slash at its end.
    """

    def __init__(self, app: ASGIApp, root_path: str, on_end: Sequence[Callable[[RequestRecord], None]]):
        self._app, self._root_path, self._on_end = app, root_path, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord.begin(scope)
        self._set_root_path(scope)

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
            self._end(scope, record)

    def _set_root_path(self, scope: Scope) -> None:
        """Add the prefix to the path unless the proxy left it there. The routes remove it again."""
        if self._root_path:
            path = scope["path"]
            prefixed = path == self._root_path or path.startswith(f"{self._root_path}/")
            scope["root_path"], scope["path"] = self._root_path, path if prefixed else self._root_path + path

    def _end(self, scope: Scope, record: RequestRecord) -> None:
        record.route = getattr(scope.get("route"), "path", "unknown")
        if record.generation is not None:
            record.generation.close()
            record.error = record.error or record.generation.error
        for call in self._on_end:
            call(record)


def log_request(record: RequestRecord) -> None:
    """Write the line of the access log, with its fields."""
    quiet = record.route in _PROBES and record.status == 200
    level = logging.DEBUG if quiet else logging.INFO
    if access_log.isEnabledFor(level):
        line = f"{record.method} {record.path} {record.status or '-'} in {record.seconds:.3f} s"
        access_log.log(level, "%s", line, extra={"fields": _fields(record), "said": _IN_LINE})


def _fields(record: RequestRecord) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "request_id": record.id,
        "client": record.client,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "seconds": round(record.seconds, 6),
    }
    if record.error:
        fields["error"] = record.error
    generation = record.generation
    if generation is not None:
        fields["uid"], fields["choices"] = generation.uids[0], len(generation.uids)
        fields["prompt_tokens"], fields["output_tokens"] = generation.prompt_tokens, generation.output_tokens
        fields["finish_reasons"] = sorted(set(generation.finish_reasons))
        if generation.first_token is not None:
            fields["first_token_seconds"] = round(generation.first_token, 6)
    return fields
