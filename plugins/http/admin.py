"""Routes for who runs the server: ``/flush_cache`` empties the prefix cache, ``POST /abort_request`` ends requests.

Names, methods and bodies are SGLang's. They need the key ``server.admin_key``, which is not that of clients: without
this option, the routes refuse each request.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from fastapi import APIRouter, Request, Response

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.core import SamplingParams
from minisgl.message import Prompt
from minisgl.plugins.http.apis import queries
from minisgl.sampling_params import shorten
from minisgl.server.app import Api, is_authorized
from minisgl.server.errors import CLIENT_CLOSED_REQUEST, ApiError
from minisgl.server.extension import HttpExtension
from minisgl.server.generate import Json
from minisgl.server.request_record import RequestRecord

ABORTED = "The administrator of the server aborted the request."


@hookimpl
def minisgl_http(config: Config) -> HttpExtension:
    return Admin(config.server.admin_key)


class AbortBody(msgspec.Struct, kw_only=True):
    """The body of ``POST /abort_request``: the id of a request, or ``abort_all``.

    The id is that of the response, such as ``chatcmpl-…``, or that of the header ``X-Request-Id``.
    ``abort_message`` is the error that the client of an aborted request gets.
    """

    rid: str = ""
    abort_all: bool = False
    abort_message: str = ABORTED


class Admin(HttpExtension):
    """The routes. ``key`` is None if nothing may use them."""

    options = ("admin_key",)

    def __init__(self, key: str | None):
        self._key = key
        self._open: dict[int, RequestRecord] = {}  # HTTP requests that generate, by the identity of their records

    def add_probes(self, router: APIRouter, api: Api) -> None:
        """Add the routes, which ask for a key of their own and not for the API key."""

        @router.api_route("/flush_cache", methods=["GET", "POST"])
        async def flush_cache(request: Request) -> Response:
            self._check_key(request)
            pages: int | None = queries.BUSY
            while pages == queries.BUSY:
                pages = await queries.ask_worker(api.dispatcher, "scheduler-0", queries.flush_cache)
            if pages is None:
                raise ApiError(
                    400, "The cache was not emptied: there are running or waiting requests.", code="requests_open"
                )
            return Json({"success": True, "num_pages": pages})

        @router.post("/abort_request")
        async def abort_request(request: Request) -> Response:
            self._check_key(request)
            body, _ = await api.read(request, AbortBody, check_abort)
            found = [record for record in self._open.values() if body.abort_all or is_named(record, body.rid)]
            error = shorten(body.abort_message, 500), CLIENT_CLOSED_REQUEST, "request_aborted"
            ended = [record.stream is not None and api.dispatcher.end(record.stream, *error) for record in found]
            return Json({"success": True, "num_aborted": sum(ended)})

    def admit(self, prompts: Sequence[Prompt], params: SamplingParams, record: RequestRecord) -> None:
        """Note a generation. `on_end` forgets it, whether or not it is submitted."""
        self._open[id(record)] = record

    def on_end(self, record: RequestRecord) -> None:
        self._open.pop(id(record), None)

    def _check_key(self, request: Request) -> None:
        """Raise `ApiError` unless the request has the admin key."""
        if self._key is None:
            path = request.scope["route"].path
            raise ApiError(403, f"{path} needs a server with the option server.admin_key.", code="no_admin_key")
        if not is_authorized(request.headers.get("authorization", ""), self._key):
            raise ApiError(401, "Send Authorization: Bearer <server.admin_key>.", code="invalid_admin_key")


def check_abort(body: AbortBody) -> None:
    """Raise `ApiError` for a body that names no request."""
    if not body.rid and not body.abort_all:
        raise ApiError(400, "Give rid, the id of a request, or abort_all: true.", "rid", "missing_required_parameter")


def is_named(record: RequestRecord, rid: str) -> bool:
    """Return whether ``rid`` is the id of an HTTP request, or of its response."""
    return rid == record.id or (record.stream is not None and rid == record.stream.response_id)
