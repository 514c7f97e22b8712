"""Runs one request to generate: sends it off, waits for what it gains, answers; or aborts it when the client goes away.

Knows ASGI and the dispatcher. What an answer looks like is `answers`' business.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.core import Finished
from minisgl.message import Delta
from minisgl.server.answers import Answer, Choice
from minisgl.server.dispatch import Dispatcher, Stream
from minisgl.server.errors import ApiError

T = TypeVar("T")
HUNG_UP = 499
"""The status of an answer that nobody hears."""


class Json(Response):
    """A JSON body, encoded by msgspec."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


async def whole(request: Request, dispatcher: Dispatcher, stream: Stream, answer: Answer) -> Response:
    """Wait for all choices and answer at once. Raises `ApiError` where one of them failed."""
    choices = [Choice(index) for index in range(len(stream.uids))]

    async def collect() -> None:
        while not stream.done:
            for index, delta in await stream.get():
                _check(delta, answer)
                choices[index].take(delta)

    try:
        if not await _unless_gone(request.receive, collect()):
            return Response(status_code=HUNG_UP)
    finally:
        dispatcher.abort(stream)  # whatever has not ended
    return Json(answer.whole(choices))


async def streamed(request: Request, dispatcher: Dispatcher, stream: Stream, answer: Answer) -> Response:
    """Answer in chunks as they come. Raises `ApiError` where a request is refused before it began."""
    try:
        if not await _unless_gone(request.receive, stream.accepted()):
            dispatcher.abort(stream)
            return Response(status_code=HUNG_UP)
        for delta in stream.peek():
            _check(delta, answer)
    except BaseException:
        dispatcher.abort(stream)
        raise
    return EventStream(dispatcher, stream, answer)


class EventStream(Response):
    """Server-sent events: a chunk of the answer each, then ``[DONE]``; or an error, with which the stream ends."""

    media_type = "text/event-stream"

    def __init__(self, dispatcher: Dispatcher, stream: Stream, answer: Answer):
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache"})
        self._dispatcher, self._stream, self._answer = dispatcher, stream, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def run() -> None:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for events in self._events():
                await send({"type": "http.response.body", "body": events, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await _unless_gone(receive, run())
        finally:
            self._dispatcher.abort(self._stream)

    async def _events(self) -> AsyncIterator[bytes]:
        stream, answer = self._stream, self._answer
        choices = [Choice(index) for index in range(len(stream.uids))]
        ends: list[Finished | None] = [None] * len(choices)
        yield _encode(*(answer.opening(choice.index) for choice in choices))
        while not stream.done:
            gained: dict[int, Choice] = {}
            for index, delta in await stream.get():
                try:
                    _check(delta, answer)
                except ApiError as error:
                    yield _encode(error.body)
                    return
                gained.setdefault(index, choices[index]).take(delta)
                ends[index] = delta.finish
            # A choice without new text (half a character, a stop string that may begin) has nothing to show yet.
            shown = [c for c in gained.values() if c.text or c.logprobs or c.finish or (answer.token_ids and c.tokens)]
            if shown:
                yield _encode(*map(answer.chunk, shown))
                for choice in shown:
                    choices[choice.index] = choice.next()
        yield _encode(answer.closing(ends)) + b"data: [DONE]\n\n"


def _encode(*events: dict[str, Any] | None) -> bytes:
    return b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events if event is not None)


def _check(delta: Delta, answer: Answer) -> None:
    """Raise `ApiError` where the delta ends its request with an error."""
    end = delta.finish
    if end is None or end.finish_reason in ("stop", "length"):
        return
    if end.finish_reason == "abort":
        raise ApiError(500, "The request was aborted.")
    raise ApiError.ended(end, {"prompt": "messages"} if answer.chat else None)


async def _unless_gone(receive: Receive, work: Awaitable[T]) -> bool:
    """Do the work unless the client goes away first; whether it was done. Raises what it raised."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task.done()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
