"""The responses to generation requests, in full or as a stream: their bodies, and the wait for their output.

`ResponseBuilder` formats chats as the OpenAI API does; a subclass has another format, such as that of completions.
`respond_json` and `respond_stream` wait for the output and send it, or abort if the client disconnects.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.core import Finished
from minisgl.message import Delta, PromptLogprob, TokenLogprob
from minisgl.server.answer import AnswerReader, CallBegin, Part, PlainReader, Reasoning, message, message_delta
from minisgl.server.dispatch import Dispatcher
from minisgl.server.errors import CLIENT_CLOSED_REQUEST, NO_NAMES, ApiError
from minisgl.server.request_record import Stream

T = TypeVar("T")
MIN_LOGPROB = -9999.0
"""The smallest log-probability in a response. It replaces minus infinity, which JSON can't represent."""
MAX_SILENCE = 0.05
"""Seconds after which tokens without text are sent as a chunk with an empty text, so that a client sees that the server
computes its request. Special tokens have no text, and the beginning of a stop string is held back."""


@dataclass
class Choice:
    """The output of one choice: all of it for a full response, or the part for the next chunk of a stream.

    ``index`` is the choice's position in the response. ``text`` is the output as the model wrote it, and ``parts`` are
    the same text as ``reader`` reads it. ``has_calls`` is true once the output has had a tool call. ``matched_stop`` is
    the stop string that cut the output. A token whose text comes with a later token's is reasoning if that one is.
    """

    index: int
    reader: AnswerReader = field(default_factory=PlainReader)
    text: str = ""
    parts: list[Part] = field(default_factory=list)
    has_calls: bool = False
    reasoning_tokens: int = 0
    num_unread: int = 0  # the number of tokens whose text has not come
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[list[PromptLogprob] | None] = field(default_factory=list)
    finish: Finished | None = None
    matched_stop: str | None = None

    def add(self, delta: Delta) -> None:
        """Append a delta of this choice's request."""
        self.text += delta.text
        parts = self.reader.feed(delta.text) + (self.reader.finish() if delta.finish is not None else [])
        self.parts += parts
        self.num_unread += len(delta.tokens)
        if parts:
            self.reasoning_tokens += self.num_unread if isinstance(parts[-1], Reasoning) else 0
            self.num_unread = 0
        self.has_calls = self.has_calls or any(isinstance(part, CallBegin) for part in parts)
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.finish = delta.finish
        self.matched_stop = delta.matched_stop or self.matched_stop

    def next_chunk(self) -> Choice:
        """Return an empty `Choice` for the same index, which collects the output for the chunk after this one."""
        carried = {name: getattr(self, name) for name in ("has_calls", "matched_stop", "num_unread")}
        return Choice(self.index, self.reader, **carried)

    @property
    def finish_reason(self) -> str | None:
        """Why the choice ended, in the words of a chat: an answer with tool calls that is complete has "tool_calls"."""
        if self.finish is None:
            return None
        return "tool_calls" if self.has_calls and self.finish.finish_reason == "stop" else self.finish.finish_reason


class ResponseBuilder:
    """The builder of the response to one HTTP request, in the format of chat completions.

    `full` builds the body of a response that is not streamed. For a streamed response, `first_chunk`, `chunk`,
    `usage_chunk` and `error` build the bodies of its events, which `encode` makes bytes. ``n`` is the number of choices
    of each prompt. ``logprobs`` and ``token_ids`` add these fields to the choices. ``include_usage`` adds the usage to
    a stream, and ``continuous_usage`` to each of its chunks, as in vLLM. ``prompt_logprobs`` adds the prompt's
    log-probabilities to a response that is not streamed. The response's id ends in ``request_id``. ``names`` are the
    client's names of fields: `ApiError.from_finished`. ``make_reader`` returns the reader of one choice's text.
    """

    chat, id_prefix, kind, chunk_kind = True, "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        *,
        model: str,
        n: int,
        logprobs: bool,
        token_ids: bool,
        include_usage: bool,
        continuous_usage: bool = False,
        prompt_logprobs: bool = False,
        request_id: str | None = None,
        names: Mapping[str, str] = NO_NAMES,
        make_reader: Callable[[], AnswerReader] = PlainReader,
    ):
        self.model, self.n, self.make_reader = model, n, make_reader
        self.logprobs, self.token_ids, self.include_usage = logprobs, token_ids, include_usage
        self.continuous_usage = include_usage and continuous_usage
        self.prompt_logprobs, self.names = prompt_logprobs, names
        self.reasoning_tokens = 0  # of all choices, in the chunks so far
        self.id = f"{self.id_prefix}-{request_id or uuid.uuid4().hex}"
        self.created = int(time.time())

    def full(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        body = [
            {"index": choice.index, **self.content(choice), **self._common_fields(choice, self.logprobs)}
            for choice in choices
        ]
        self.reasoning_tokens = sum(choice.reasoning_tokens for choice in choices)
        response = {**self._head(self.kind), "choices": body, "usage": self.usage([c.finish for c in choices])}
        if self.prompt_logprobs:  # a chat has one prompt
            response["prompt_logprobs"] = vllm_prompt_logprobs(choices[0])
        return response

    def content(self, choice: Choice) -> dict[str, Any]:
        """Return the fields of a choice that has ended, with its whole output."""
        return {"message": {"role": "assistant", "refusal": None, **message(choice.parts)}}

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        """Return the first chunk of a choice, with the role of the message. None: there is none."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def chunk(self, choice: Choice) -> dict[str, Any]:
        """Return the chunk with the output of a choice since its last chunk."""
        self.reasoning_tokens += choice.reasoning_tokens
        common = self._common_fields(choice, bool(choice.logprobs))
        return self._chunk({"index": choice.index, **self.delta(choice), **common})

    def delta(self, choice: Choice) -> dict[str, Any]:
        """Return the fields of a choice with its output since its last chunk."""
        delta = message_delta(choice.parts)
        return {"delta": {"content": ""} if not delta and choice.finish is None else delta}

    def usage_chunk(self, ends: Sequence[Finished | None]) -> dict[str, Any] | None:
        """Return the last chunk of a stream, which has the usage, or None if the client did not ask for the usage."""
        return {**self._chunk(), "usage": self.usage(ends)} if self.include_usage else None

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return the last event of a stream that fails."""
        return error.body

    def encode(self, events: Sequence[dict[str, Any] | None]) -> bytes:
        """Return events as they are sent. None is no event."""
        return b"".join([b"data: %b\n\n" % msgspec.json.encode(event) for event in events if event is not None])

    def end(self, ends: Sequence[Finished | None]) -> bytes:
        """Return the end of a stream, as it is sent."""
        return self.encode([self.usage_chunk(ends)]) + b"data: [DONE]\n\n"

    def usage(self, ends: Sequence[Finished | None]) -> dict[str, Any]:
        """Return the token counts over all choices. A prompt counts once, although ``n`` choices share it."""
        finished = [end for end in ends if end is not None]
        first_choices = finished[:: self.n]
        prompt_tokens = sum(end.prompt_tokens for end in first_choices)
        counts = _usage(prompt_tokens, sum(end.output_tokens for end in finished))
        counts["prompt_tokens_details"] = {"cached_tokens": sum(end.cached_tokens for end in first_choices)}
        counts["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return counts

    def usage_so_far(self, stream: Stream, output_tokens: int) -> dict[str, Any]:
        """Return the token counts of a stream that has not ended. They have no cached tokens yet."""
        return _usage(sum(stream.num_prompt_tokens[:: self.n]), output_tokens)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head(self.chunk_kind), "choices": choices}
        return {**chunk, "usage": None} if self.include_usage else chunk

    def _common_fields(self, choice: Choice, with_logprobs: bool) -> dict[str, Any]:
        """Return the fields of a choice that do not depend on the format of its text."""
        fields = {
            "logprobs": self.format_logprobs(choice) if with_logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        if choice.finish is not None and choice.matched_stop is not None:
            fields["stop_reason"] = choice.matched_stop  # vLLM's field
        return {**fields, "token_ids": choice.tokens} if self.token_ids else fields

    def format_logprobs(self, choice: Choice) -> dict[str, Any]:
        """Return the log-probabilities of a choice's tokens."""

        def entry(token: TokenLogprob) -> dict[str, Any]:
            return {"token": token.text, "logprob": max(token.logprob, MIN_LOGPROB), "bytes": list(token.raw)}

        content = [{**entry(t), "top_logprobs": [entry(top) for top in t.top]} for t in choice.logprobs]
        return {"content": content, "refusal": None}


def vllm_prompt_logprobs(choice: Choice) -> list[dict[str, Any] | None]:
    """Return the prompt's log-probabilities in vLLM's format: for each position, token id → log-probability."""
    return [
        {
            str(p.token): {"logprob": max(p.logprob, MIN_LOGPROB), "rank": p.rank, "decoded_token": p.text}
            for p in position
        }
        if position is not None
        else None
        for position in choice.prompt_logprobs
    ]


def _usage(prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
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
    choices = [Choice(index, builder.make_reader()) for index in range(len(stream.uids))]

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
        self._sent = [0.0] * len(stream.uids)  # the time of each choice's last chunk
        self._output_tokens = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_unless_disconnected(receive, self._send_events(send))
        finally:
            self._dispatcher.abort(self._stream)

    async def _send_events(self, send: Send) -> None:
        stream, builder = self._stream, self._builder
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        # the output since the last chunk of each choice
        choices = [Choice(index, builder.make_reader()) for index in range(len(stream.uids))]
        body = self._encode([builder.first_chunk(choice.index) for choice in choices])
        self._sent = [time.monotonic()] * len(choices)
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

        A choice may have new tokens but no new text: an incomplete character, or the beginning of a stop string. Such a
        choice gets a chunk only if the client asked for token ids, or `MAX_SILENCE` after its last chunk. Raise
        `ApiError` if a choice failed.
        """
        for index, delta in deltas:
            _check(delta, self._builder)
            choices[index].add(delta)
            self._output_tokens += len(delta.tokens)
        with_ids, now = self._builder.token_ids, time.monotonic()
        chunks: list[dict[str, Any] | None] = []
        for index in dict.fromkeys(index for index, _ in deltas):
            choice = choices[index]
            due = with_ids or now - self._sent[index] > MAX_SILENCE
            if choice.parts or choice.logprobs or choice.finish or (due and choice.tokens):
                self._sent[index] = now
                chunks.append(self._builder.chunk(choice))
                choices[index] = choice.next_chunk()
        return self._encode(chunks)

    def _encode(self, chunks: list[dict[str, Any] | None]) -> bytes:
        if self._builder.continuous_usage:
            usage = self._builder.usage_so_far(self._stream, self._output_tokens)
            chunks = [None if chunk is None else {**chunk, "usage": usage} for chunk in chunks]
        return self._builder.encode(chunks)


def _check(delta: Delta, builder: ResponseBuilder) -> None:
    """Raise `ApiError` if the delta ends its request with an error."""
    end = delta.finish
    if end is None or end.finish_reason in ("stop", "length"):
        return
    if end.finish_reason == "abort":
        raise ApiError(500, "The request was aborted.")
    raise ApiError.from_finished(end, builder.names)


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
