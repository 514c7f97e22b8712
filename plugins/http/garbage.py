"""Python's garbage in the API server, collected while no request waits for it.

A full collection takes 0.2 s in a burst of requests. Python would begin one at any time.
"""

from __future__ import annotations

import asyncio
import gc
import itertools

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.server.app import Api
from minisgl.server.dispatch import Dispatcher
from minisgl.server.extension import HttpExtension

GC_SECONDS = 60
"""The longest time in seconds between two full garbage collections. They take place while no request is open."""


@hookimpl
def minisgl_http(config: Config) -> HttpExtension:
    return Garbage()


class Garbage(HttpExtension):
    """Collects garbage every second while no request is open, and at least every `GC_SECONDS`."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def begin(self, api: Api) -> None:
        gc.freeze()  # what exists now lives until the end: exclude it from collections
        gc.set_threshold(1_000, 10, 1_000_000)  # no full collections of Python's own
        self._task = asyncio.create_task(_collect(api.dispatcher))

    def close(self, timeout: float) -> None:
        if self._task is not None:
            self._task.cancel()


async def _collect(dispatcher: Dispatcher) -> None:
    for second in itertools.count():
        if dispatcher.num_open == 0 or second % GC_SECONDS == 0:
            gc.collect()
        await asyncio.sleep(1.0)
