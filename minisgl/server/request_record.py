"""What the API server knows of each HTTP request: its record, and the stream of the replies to it.

`RequestMiddleware`, the outermost ASGI application, makes a record for every request and closes it. It surrounds the
routes and their error handlers, so it sees every response that is made from a parsed request, also that to an unknown
URL and that after an error in a route. The routes and the responses fill in the record.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.core import Finished
from minisgl.message import Delta
from minisgl.sampling_params import SamplingParams, shorten

log = logging.getLogger(__name__)

_KEY = "minisgl.record"
_PARAMS = SamplingParams()
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


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

    # ---- after the response --------------------------------------------------------------------------------

    def close(self) -> None:
        """End: a request without an end counts as aborted."""
        if None in self.ends:
            self.error = self.error or "The client disconnected."


@dataclass
class RequestRecord:
    """One HTTP request, from its arrival to the end of its response.

    ``path`` is percent-encoded and without the query, which may hold secrets. ``arrival`` is a time of
    `time.monotonic`, ``arrival_ns`` one of `time.time_ns`. ``status`` is 0 until the response begins. ``error`` says
    why the request failed, also if the response had begun; it is empty if it did not fail.
    """

    id: str
    method: str
    path: str
    client: str
    headers: Headers
    arrival: float = field(default_factory=time.monotonic)
    arrival_ns: int = field(default_factory=time.time_ns)
    status: int = 0
    route: str = "unknown"
    error: str = ""
    stream: Stream | None = None

    @staticmethod
    def begin(scope: Scope) -> RequestRecord:
        """Return a new record for the request of an ASGI scope, and keep it in the scope for `record_of`."""
        headers = Headers(scope=scope)
        client = scope.get("client")
        record = RequestRecord(
            id=request_id(headers.get("x-request-id")),
            method=shorten(scope["method"], 20),
            path=shorten(quote(scope["path"])),
            client=shorten(client[0]) if client else "",
            headers=headers,
        )
        scope[_KEY] = record
        return record

    @property
    def seconds(self) -> float:
        """The time since the request arrived."""
        return time.monotonic() - self.arrival


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of the request whose ASGI scope this is."""
    record = scope[_KEY]
    assert isinstance(record, RequestRecord)
    return record


def request_id(given: str | None) -> str:
    """Return the request id that the client gave, or a new one if the client gave none that can be used.

    An id has 1 to 128 letters, digits and characters of ``._:/+=@-``, so that it can't add a line to a log.
    """
    return given if given is not None and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


class RequestMiddleware:
    """ASGI middleware around all others.

    The response gets the header ``X-Request-Id``. After a 500 it gets ``Connection: close`` too: a request failed in a
    way that the server does not know, so no other request should use its connection. Each function of ``on_end`` is
    called with the record of a request whose response has ended.
    """

    def __init__(self, app: ASGIApp, on_end: Sequence[Callable[[RequestRecord], None]]):
        self._app, self._on_end = app, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord.begin(scope)

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

    def _end(self, scope: Scope, record: RequestRecord) -> None:
        record.route = getattr(scope.get("route"), "path", "unknown")
        if record.stream is not None:
            record.stream.close()
            record.error = record.error or record.stream.error
        for call in self._on_end:
            call(record)
