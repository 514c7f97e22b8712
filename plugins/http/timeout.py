"""The option ``server.request_timeout``: a request that takes longer ends with an error (504)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.message import Delta
from minisgl.server.app import Api
from minisgl.server.errors import timed_out
from minisgl.server.extension import HttpExtension
from minisgl.server.request_record import RequestRecord, Stream


@hookimpl
def minisgl_http(config: Config) -> HttpExtension | None:
    seconds = config.server.request_timeout
    return None if seconds is None else Timeout(seconds)


class Timeout(HttpExtension):
    """Ends the requests of an HTTP request that has taken ``seconds`` since its arrival."""

    options = ("request_timeout",)

    def __init__(self, seconds: float):
        self._seconds = seconds
        self.timers: dict[Stream, asyncio.TimerHandle] = {}

    def begin(self, api: Api) -> None:
        self._api = api

    def watch(self, stream: Stream) -> Callable[[int, Delta], None] | None:
        left = stream.arrival + self._seconds - time.monotonic()
        error, end = timed_out(self._seconds), self._api.dispatcher.end
        loop = asyncio.get_running_loop()
        self.timers[stream] = loop.call_later(left, end, stream, error.message, error.status)
        return None

    def on_end(self, record: RequestRecord) -> None:
        stream = record.stream
        if stream is not None and stream in self.timers:
            self.timers.pop(stream).cancel()
