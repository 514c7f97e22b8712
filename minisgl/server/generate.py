"""The responses to generation requests, in full or as a stream: their bodies, and the wait for their output.

`ResponseBuilder` formats chats as the OpenAI API does; a subclass has another format, such as that of completions.
`respond_json` and `respond_stream` wait for the output and send it, or abort if the client disconnects. A stream is a
series of server-sent events (SSE), which `ResponseBuilder.encode` makes.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.core import Finished
from minisgl.message import Delta
from minisgl.server.dispatch import Dispatcher
from minisgl.server.errors import CLIENT_CLOSED_REQUEST, ApiError
from minisgl.server.protocol import AnswerForm
from minisgl.server.request_record import Stream

T = TypeVar("T")


@dataclass
class Choice:
    """The output of one choice: all of it for a full response, or the part for the next chunk of a stream.

    ``index`` is the choice's position in the response.
    """

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: Finished | None = None

    def add(self, delta: Delta) -> None:
        """Append a delta of this choice's request."""
        self.text += delta.text
        self.tokens += delta.tokens
        self.finish = delta.finish

    @property
    def is_due(self) -> bool:
        """Whether the output needs a chunk now: it is more than tokens without text, such as half a character."""
        return self.text != "" or self.finish is not None

    def next_chunk(self) -> Choice:
        """Return an empty `Choice` for the same index, which collects the output for the chunk after this one."""
        return Choice(self.index)

    @property
    def finish_reason(self) -> str | None:
        """Why the choice ended, in the words of a chat."""
        return None if self.finish is None else self.finish.finish_reason


class ResponseBuilder:
    """The builder of the response to one HTTP request, in the format of chat completions.

    `full` builds the body of a response that is not streamed. For a streamed response, `first_chunk`, `chunk` and
    `error` build the bodies of its events, which `encode` makes bytes. ``n`` is the number of choices of each prompt.
    The response's id ends in ``request_id``. ``form`` is that of the chat. ``stream`` has the replies.
    """

    chat, id_prefix, kind, chunk_kind = True, "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        *,
        model: str,
        n: int = 1,
        request_id: str | None = None,
    ):
        self.model, self.n = model, n
        self.id = f"{self.id_prefix}-{request_id or uuid.uuid4().hex}"
        self.created = int(time.time())
        self.form = AnswerForm()
        self.stream: Stream | None = None

    def new_choice(self, index: int) -> Choice:
        """Return the output of a choice, empty."""
        return Choice(index)

    def full(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        body = [{"index": choice.index, **self.content(choice), **self._common_fields(choice)} for choice in choices]
        return {**self._head(self.kind), "choices": body, "usage": self.usage([c.finish for c in choices])}

    def content(self, choice: Choice) -> dict[str, Any]:
        """Return the fields of a choice that has ended, with its whole output."""
        return {"message": {"role": "assistant", "refusal": None, "content": choice.text}}

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        """Return the first chunk of a choice, with the role of the message. None: there is none."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def chunk(self, choice: Choice) -> dict[str, Any]:
        """Return the chunk with the output of a choice since its last chunk."""
        return self._chunk({"index": choice.index, **self.delta(choice), **self._common_fields(choice)})

    def delta(self, choice: Choice) -> dict[str, Any]:
        """Return the fields of a choice with its output since its last chunk."""
        return {"delta": {"content": choice.text} if choice.text or choice.finish is None else {}}

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return the last event of a stream that fails."""
        return error.body

    def api_error(self, end: Finished) -> ApiError:
        """Return the error of a choice that failed."""
        return ApiError.from_finished(end)

    def encode(self, events: Sequence[dict[str, Any] | None]) -> bytes:
        """Return events as they are sent. None is no event."""
        return b"".join([b"data: %b\n\n" % msgspec.json.encode(event) for event in events if event is not None])

    def end(self, ends: Sequence[Finished | None]) -> bytes:
        """Return the end of a stream, as it is sent."""
        return b"data: [DONE]\n\n"

    def usage(self, ends: Sequence[Finished | None]) -> dict[str, Any]:
        """Return the token counts over all choices. A prompt counts once, although ``n`` choices share it."""
        finished = [end for end in ends if end is not None]
        first_choices = finished[:: self.n]
        prompt_tokens = sum(end.prompt_tokens for end in first_choices)
        counts = usage_of(prompt_tokens, sum(end.output_tokens for end in finished))
        counts["prompt_tokens_details"] = {"cached_tokens": sum(end.cached_tokens for end in first_choices)}
        return counts

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(self.chunk_kind), "choices": choices}

    def _common_fields(self, choice: Choice) -> dict[str, Any]:
        """Return the fields of a choice that do not depend on the format of its text."""
        return {"logprobs": None, "finish_reason": choice.finish_reason}


def usage_of(prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    """Return token counts in the form of the OpenAI API."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
    }


# ---- sending ---------------------------------------------------------------------------------------------------


class Json(Response):
    """An HTTP response with a JSON body, encoded by msgspec."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


async def respond_json(request: Request, dispatcher: Dispatcher, stream: Stream, builder: ResponseBuilder) -> Response:
    """Wait until all choices have finished, and return the full response. Raise `ApiError` if a choice failed."""
    choices = [builder.new_choice(index) for index in range(len(stream.uids))]

    async def collect() -> None:
        while not stream.done:
            for index, delta in await stream.get():
                _check(delta, builder)
                choices[index].add(delta)

    try:
        if not await run_unless_disconnected(request.receive, collect()):
            return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        dispatcher.abort(stream)  # the requests that have not finished, after an error or a disconnect
    return Json(builder.full(choices))


async def respond_stream(
    request: Request, dispatcher: Dispatcher, stream: Stream, builder: ResponseBuilder
) -> Response:
    """Return a streamed response once the scheduler has accepted every request. Raise `ApiError` if one is refused."""
    try:
        if not await run_unless_disconnected(request.receive, stream.wait_until_accepted()):
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_unless_disconnected(receive, self._send_events(send))
        finally:
            self._dispatcher.abort(self._stream)

    async def _send_events(self, send: Send) -> None:
        stream, builder = self._stream, self._builder
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        # the output since the last chunk of each choice
        choices = [builder.new_choice(index) for index in range(len(stream.uids))]
        body = builder.encode([builder.first_chunk(choice.index) for choice in choices])
        try:
            while not stream.done:
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                body = self._next_chunks(await stream.get(), choices)
            body += builder.end(stream.ends)
        except ApiError as error:
            body = builder.encode([builder.error(error)])
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _next_chunks(self, deltas: Sequence[tuple[int, Delta]], choices: list[Choice]) -> bytes:
        """Add the deltas to their choices. Return the chunks that are due, and replace their choices by empty ones.

        Raise `ApiError` if a choice failed.
        """
        for index, delta in deltas:
            _check(delta, self._builder)
            choices[index].add(delta)
        chunks: list[dict[str, Any] | None] = []
        for index in dict.fromkeys(index for index, _ in deltas):
            choice = choices[index]
            if choice.is_due:
                chunks.append(self._builder.chunk(choice))
                choices[index] = choice.next_chunk()
        return self._builder.encode(chunks)


def _check(delta: Delta, builder: ResponseBuilder) -> None:
    """Raise `ApiError` if the delta ends its request with an error."""
    end = delta.finish
    if end is None or end.finish_reason in ("stop", "length"):
        return
    if end.finish_reason == "abort":
        raise ApiError(500, "The request was aborted.")
    raise builder.api_error(end)


async def run_unless_disconnected(receive: Receive, work: Awaitable[T]) -> bool:
    """Run ``work``, and cancel it if the client disconnects. Return whether it finished; raise its exception if any."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task.done()
    finally:
        for each in (task, disconnect):
            each.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
