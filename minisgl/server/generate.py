"""The responses to generation requests: wait for the output and send it, or abort if the client disconnects.

This module knows ASGI and the dispatcher. `minisgl.server.responses` builds the bodies of the responses.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.core import Finished
from minisgl.message import Delta
from minisgl.server.dispatch import Dispatcher
from minisgl.server.errors import ApiError
from minisgl.server.responses import Choice, ResponseBuilder
from minisgl.server.stream import Stream

T = TypeVar("T")
CLIENT_CLOSED_REQUEST = 499
"""The HTTP status of a response whose client has disconnected. No client receives it; only ``/metrics`` counts it."""

MAX_SILENCE = 0.05
"""Seconds after which tokens without text are sent as a chunk with an empty text, so that a client sees that the server
computes its request. Special tokens have no text, and the beginning of a stop string is held back."""


class Json(Response):
    """An HTTP response with a JSON body, encoded by msgspec."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


async def respond_json(request: Request, dispatcher: Dispatcher, stream: Stream, builder: ResponseBuilder) -> Response:
    """Wait until all choices have finished, and return the full response. Raise `ApiError` if a choice failed."""
    choices = [Choice(index) for index in range(len(stream.uids))]

    async def collect() -> None:
        while not stream.done:
            for index, delta in await stream.get():
                _check(delta, builder)
                choices[index].add(delta)

    try:
        if not await _run_unless_disconnected(request.receive, collect()):
            return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        dispatcher.abort(stream)  # the requests that have not finished, after an error or a disconnect
    return Json(builder.full(choices))


async def respond_stream(
    request: Request, dispatcher: Dispatcher, stream: Stream, builder: ResponseBuilder
) -> Response:
    """Return a streamed response once the scheduler has accepted every request. Raise `ApiError` if one is refused."""
    try:
        if not await _run_unless_disconnected(request.receive, stream.wait_until_accepted()):
            dispatcher.abort(stream)
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        for delta in stream.peek():
            _check(delta, builder)
    except BaseException:
        dispatcher.abort(stream)
        raise
    return EventStream(dispatcher, stream, builder)


class EventStream(Response):
    """A response of server-sent events. Each event is a chunk, and the last event is ``[DONE]``.

    If a choice fails, the last event is an error object instead.
    """

    media_type = "text/event-stream"

    def __init__(self, dispatcher: Dispatcher, stream: Stream, builder: ResponseBuilder):
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache"})
        self._dispatcher, self._stream, self._builder = dispatcher, stream, builder
        self._sent = [0.0] * len(stream.uids)  # the time of each choice's last chunk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _run_unless_disconnected(receive, self._send_events(send))
        finally:
            self._dispatcher.abort(self._stream)

    async def _send_events(self, send: Send) -> None:
        stream, builder = self._stream, self._builder
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        choices = [Choice(index) for index in range(len(stream.uids))]  # the output since the last chunk of each choice
        ends: list[Finished | None] = [None] * len(choices)
        body = _encode([builder.first_chunk(choice.index) for choice in choices])
        self._sent = [time.monotonic()] * len(choices)
        try:
            while not stream.done:
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                body = self._next_chunks(await stream.get(), choices, ends)
            body += _encode([builder.usage_chunk(ends)]) + b"data: [DONE]\n\n"
        except ApiError as error:
            body = _encode([error.body])
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _next_chunks(
        self, deltas: Sequence[tuple[int, Delta]], choices: list[Choice], ends: list[Finished | None]
    ) -> bytes:
        """Add the deltas to their choices. Return the chunks that are due, and replace their choices by empty ones.

        A choice may have new tokens but no new text: an incomplete character, or the beginning of a stop string. Such a
        choice gets a chunk only if the client asked for token ids, or `MAX_SILENCE` after its last chunk. Raise
        `ApiError` if a choice failed.
        """
        for index, delta in deltas:
            _check(delta, self._builder)
            choices[index].add(delta)
            ends[index] = delta.finish
        with_ids, now = self._builder.token_ids, time.monotonic()
        chunks = []
        for index in dict.fromkeys(index for index, _ in deltas):
            choice = choices[index]
            due = with_ids or now - self._sent[index] > MAX_SILENCE
            if choice.text or choice.logprobs or choice.finish or (due and choice.tokens):
                self._sent[index] = now
                chunks.append(self._builder.chunk(choice))
                choices[index] = choice.next_chunk()
        return _encode(chunks)


def _encode(events: Sequence[dict[str, Any] | None]) -> bytes:
    return b"".join([b"data: %b\n\n" % msgspec.json.encode(event) for event in events if event is not None])


def _check(delta: Delta, builder: ResponseBuilder) -> None:
    """Raise `ApiError` if the delta ends its request with an error."""
    end = delta.finish
    if end is None or end.finish_reason in ("stop", "length"):
        return
    if end.finish_reason == "abort":
        raise ApiError(500, "The request was aborted.")
    raise ApiError.from_finished(end, {"prompt": "messages"} if builder.chat else None)


async def _run_unless_disconnected(receive: Receive, work: Awaitable[T]) -> bool:
    """Run ``work``, and cancel it if the client disconnects. Return whether it finished; raise its exception if any."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task.done()
    finally:
        for each in (task, disconnect):
            each.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
