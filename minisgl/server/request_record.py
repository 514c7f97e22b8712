"""What the API server knows of each HTTP request: its record, and the stream of the replies to it.

The routes, the responses and the extensions fill in the record. `minisgl.plugins.http.records` adds what the HTTP
server knows of the request and of its response.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from starlette.types import Scope

from minisgl.core import Finished
from minisgl.message import Delta
from minisgl.sampling_params import SamplingParams, shorten

_KEY = "minisgl.record"
_PARAMS = SamplingParams()


class Stream:
    """The replies to the requests of one HTTP request, and the progress of these requests.

    An HTTP request has one request for each choice of each prompt: ``uids``. An event is ``(index, delta)``, where
    ``index`` is the request's position in ``uids``. ``tokenizer`` is the index of the tokenizer that got the requests.
    ``client`` says whose HTTP request it is. ``num_open`` counts the requests without their final reply. Each of
    ``listeners`` is called with every event at its arrival.

    ``arrival`` is the time at which the HTTP request arrived. ``chat`` and ``response_id``, the field ``id`` of the
    response, describe the response. ``num_prompt_tokens`` has the prompt tokens of each accepted request. ``ends`` says
    for each request how it ended. ``error`` is the message of the first one that failed, or empty. ``first_token`` are
    the seconds from the arrival to the first token of any request.
    """

    def __init__(self, uids: Sequence[int], tokenizer: int, client: str = "", params: SamplingParams = _PARAMS):
        self.uids, self.tokenizer, self.client, self.params = uids, tokenizer, client, params
        self.arrival, self.chat, self.response_id = time.monotonic(), False, ""
        self.listeners: Sequence[Callable[[int, Delta], None]] = ()
        self.ends: list[Finished | None] = [None] * len(uids)
        self.error = ""
        self.num_prompt_tokens = [0] * len(uids)
        self.output_tokens = 0
        self.first_token: float | None = None
        self.num_open = len(uids)
        self._events: list[tuple[int, Delta]] = []
        self._accepted = 0
        self._waiter: asyncio.Future[None] | None = None

    # ---- the dispatcher adds events ------------------------------------------------------------------------

    def put(self, index: int, delta: Delta) -> None:
        """Add an event."""
        self.output_tokens += len(delta.tokens)
        if delta.tokens and self.first_token is None:
            self.first_token = time.monotonic() - self.arrival
        if delta.finish is not None:
            self.num_open -= 1
            self.ends[index] = delta.finish
            if delta.finish.finish_reason == "error":
                self.error = self.error or delta.finish.error
        self._events.append((index, delta))
        self._wake()
        for listener in self.listeners:
            listener(index, delta)

    def accept(self, index: int, prompt_tokens: int) -> None:
        """Note that the scheduler accepted the request number ``index``, whose prompt has this many tokens."""
        self.num_prompt_tokens[index] = prompt_tokens
        self._accepted += 1
        self._wake()

    # ---- the response reads them ---------------------------------------------------------------------------

    async def wait_until_accepted(self) -> None:
        """Wait until the scheduler has accepted every request, or an event has arrived, such as a refusal."""
        while self._accepted < len(self.uids) and not self._events:
            await self._wait()

    @property
    def done(self) -> bool:
        """Whether `get` has returned every final reply."""
        return self.num_open == 0 and not self._events

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


@dataclass
class RequestRecord:
    """One HTTP request, from its arrival to the end of its response.

    ``id`` names it in logs and in the response. ``client`` is the address that sent it. ``arrival`` is a time of
    `time.monotonic`, ``arrival_ns`` one of `time.time_ns`. ``error`` says why the request failed, also if the response
    had begun; it is empty if it did not fail. ``stream`` has the replies to the requests that it submitted last.

    The other fields are those of `minisgl.plugins.http.records`. ``path`` is percent-encoded and without the query,
    which may hold secrets. ``status`` is 0 until the response begins.
    """

    client: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    arrival: float = field(default_factory=time.monotonic)
    arrival_ns: int = field(default_factory=time.time_ns)
    error: str = ""
    stream: Stream | None = None
    method: str = ""
    path: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    status: int = 0
    route: str = "unknown"

    @property
    def seconds(self) -> float:
        """The time since the request arrived."""
        return time.monotonic() - self.arrival


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of the request whose ASGI scope this is. The first call makes it."""
    if _KEY not in scope:
        client = scope.get("client")
        scope[_KEY] = RequestRecord(shorten(client[0]) if client else "")
    record = scope[_KEY]
    assert isinstance(record, RequestRecord)
    return record
