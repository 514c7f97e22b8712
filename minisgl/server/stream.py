"""The stream of replies to the requests of one HTTP request, between the dispatcher and the HTTP handler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from minisgl.message import Delta


class Stream:
    """The replies to the requests of one HTTP request.

    An HTTP request has one request for each choice of each prompt: ``uids``. An event is ``(index, delta)``, where
    ``index`` is the request's position in ``uids``. ``tokenizer`` is the index of the tokenizer that got the requests.
    ``client`` says whose HTTP request it is. ``listener``, if there is one, is called with every event at its arrival.
    """

    def __init__(self, uids: Sequence[int], tokenizer: int, client: str = ""):
        self.uids, self.tokenizer, self.client = uids, tokenizer, client
        self.listener: Callable[[int, Delta], None] | None = None
        self._open = len(uids)  # the number of requests without their final reply
        self._events: list[tuple[int, Delta]] = []
        self._accepted = 0
        self._waiter: asyncio.Future[None] | None = None

    def put(self, index: int, delta: Delta) -> None:
        """Add an event. The dispatcher calls this."""
        if delta.finish is not None:
            self._open -= 1
        self._events.append((index, delta))
        self._wake()
        if self.listener is not None:
            self.listener(index, delta)

    def accept(self) -> None:
        """Count one more request that the scheduler accepted. The dispatcher calls this."""
        self._accepted += 1
        self._wake()

    async def wait_until_accepted(self) -> None:
        """Wait until the scheduler has accepted every request, or an event has arrived, such as a refusal."""
        while self._accepted < len(self.uids) and not self._events:
            await self._wait()

    @property
    def done(self) -> bool:
        """Whether `get` has returned every final reply."""
        return self._open == 0 and not self._events

    def peek(self) -> list[Delta]:
        """Return the deltas that have arrived and were not returned by `get`. The next `get` returns them too."""
        return [delta for _, delta in self._events]

    async def get(self) -> list[tuple[int, Delta]]:
        """Return the events that have arrived since the last call, in order. Wait for an event if there is none."""
        while not self._events:
            await self._wait()
        events, self._events = self._events, []
        return events

    async def _wait(self) -> None:
        """Wait for the next `put` or `accept`. One task waits at a time. For each token: `asyncio.Event` costs more."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
