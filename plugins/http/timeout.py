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
        self.timers[stream] = asyncio.get_running_loop().call_later(left, self._end, stream)
        return None

    def _end(self, stream: Stream) -> None:
        error = timed_out(self._seconds)
        del self.timers[stream]  # an HTTP request may have had several streams, and `on_end` knows the last one
        self._api.dispatcher.end(stream, error.message, error.status)

    def on_end(self, record: RequestRecord) -> None:
        stream = record.stream
        if stream is not None and stream in self.timers:
            self.timers.pop(stream).cancel()
