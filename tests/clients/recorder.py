"""A plugin for the tests of clients: records the requests that a server gets.

The environment variable ``MINISGL_REQUESTS`` names the file. It gets a line of JSON for each request, in the order in
which the requests were complete.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.server.extension import HttpExtension


@hookimpl
def minisgl_http(config: Config) -> HttpExtension:
    return Recorder(Path(os.environ["MINISGL_REQUESTS"]))


class Recorder(HttpExtension):
    """Appends each request to a file."""

    def __init__(self, file: Path):
        self._file = file

    def wrap(self, app: ASGIApp) -> ASGIApp:
        async def recorded(scope: Scope, receive: Receive, send: Send) -> None:
            body = bytearray()

            async def listen() -> Message:
                message = await receive()
                if message["type"] == "http.request":
                    body.extend(message.get("body", b""))
                    if not message.get("more_body", False):
                        self._write(scope, body)
                return message

            await app(scope, listen if scope["type"] == "http" else receive, send)

        return recorded

    def _write(self, scope: Scope, body: bytes) -> None:
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        line = {"method": scope["method"], "path": scope["path"], "headers": headers, "body": body.decode()}
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")
