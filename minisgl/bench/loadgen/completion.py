"""The OpenAI API as the load generator uses it: bodies of requests, and the events of a streamed response.

What counts as a token's time is defined here. As in ``vllm bench serve``, it is the arrival of an event with a choice;
an event with several tokens counts once. An event that only opens a chat message (its role, without text) is no token.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from minisgl.bench.loadgen.http import HttpClient, RequestError

MAX_REASON = 160
"""The largest number of characters of a reason for a failure."""


@dataclass
class RequestRecord:
    """The measurement of one request. Times are those of `time.perf_counter`, which all processes share.

    - ``due``: when the request was to be sent; None in a closed loop.
    - ``start``: when it was sent, before a connection is opened for it.
    - ``times``: the arrival of each event with output. ``end``: the end of the response.
    - ``error``: why the request failed, or empty. ``wrong``: what is wrong with a complete answer, or empty.
    """

    index: int
    asked_len: int
    prompt_len: int
    due: float | None = None
    start: float = 0.0
    end: float = 0.0
    times: list[float] = field(default_factory=list)
    output_len: int = 0
    cached_len: int = 0
    error: str = ""
    wrong: str = ""
    interrupted: bool = False
    text: str = ""

    @property
    def completed(self) -> bool:
        return not self.error and not self.interrupted

    @property
    def ttft(self) -> float:
        """Seconds from sending the request to its first token."""
        return self.times[0] - self.start if self.times else 0.0

    @property
    def latency(self) -> float:
        """Seconds from sending the request to its last token."""
        return self.times[-1] - self.start if self.times else 0.0


@dataclass(frozen=True)
class Template:
    """What all requests of a run have in common."""

    chat: bool
    model: str
    temperature: float
    ignore_eos: bool
    seed: int

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, index: int, prompt: list[int] | str, output_len: int) -> bytes:
        """Return the JSON body of request ``index``."""
        content = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        body: dict[str, Any] = {
            "model": self.model,
            **content,
            "max_tokens": output_len,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.temperature > 0:
            body["seed"] = self.seed + index
        return msgspec.json.encode(body)


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class StreamReader:
    """Reads the response to one request into its record."""

    def __init__(self, record: RequestRecord, ignore_eos: bool, keep_text: bool = False):
        self._record, self._ignore_eos, self._keep_text = record, ignore_eos, keep_text
        self._status, self._content_type = 0, ""
        self._rest = b""
        self._finished = self._ended = False
        self._has_usage = False

    def start(self, status: int, content_type: str) -> None:
        self._status, self._content_type = status, content_type

    def feed(self, data: bytes, now: float) -> None:
        if self._status != 200 or "json" in self._content_type:
            self._rest = (self._rest + data)[: 2**16]
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._ended = True
            return
        try:
            event = _decode(data)
        except msgspec.MsgspecError as error:
            self._fail(f"an event of the stream cannot be read: {error}")
            return
        if event.error is not None:
            self._fail(f"error in the stream: {_message(event.error)}")
        for choice in event.choices[:1]:
            self._finished |= choice.finish_reason is not None
            if not _opens_message(choice):
                self._record.times.append(now)
            if self._keep_text:
                self._record.text += choice.text or (choice.delta.content if choice.delta else "") or ""
        if event.usage is not None:
            self._read_usage(event.usage)

    def _fail(self, reason: str) -> None:
        """Record the first reason for which the stream is a failure."""
        self._record.error = self._record.error or reason[:MAX_REASON]

    def _read_usage(self, usage: _Usage) -> None:
        self._has_usage = usage.completion_tokens is not None
        self._record.output_len = usage.completion_tokens or 0
        self._record.prompt_len = usage.prompt_tokens or self._record.prompt_len
        if usage.prompt_tokens_details is not None:
            self._record.cached_len = usage.prompt_tokens_details.cached_tokens or 0

    def finish(self) -> None:
        """Check the complete response. Raise `RequestError` if it is a failure; set ``wrong`` of the record."""
        record = self._record
        if self._status == 200 and self._rest.startswith(b"data:"):  # a last line without a line break
            self._event(self._rest[5:].strip(), time.perf_counter())
        if self._status != 200:
            raise RequestError(f"HTTP {self._status}: {_reason(self._rest)}"[:MAX_REASON])
        if record.error:
            raise RequestError(record.error)
        if not record.times:
            kind = self._content_type.partition(";")[0] or "no type"
            raise RequestError(f"the response ({kind}) has no event with output")
        if not (self._finished or self._ended):
            raise RequestError("the stream ended without a finish_reason and without [DONE]")
        if not self._has_usage:
            record.output_len = len(record.times)
            record.wrong = "no usage in the stream: events are counted as tokens"
        elif self._ignore_eos and record.output_len != record.asked_len:
            record.wrong = "another number of tokens than max_tokens, with ignore_eos"


async def exchange(
    http: HttpClient, path: str, body: bytes, record: RequestRecord, reader: StreamReader, timeout: float
) -> None:
    """Send one request and read its response into its record. Does not raise: the record says why a request failed."""
    record.start = time.perf_counter()
    try:
        async with asyncio.timeout(timeout):
            await http.post(path, body, reader)
        reader.finish()
    except RequestError as error:
        record.error = str(error)
    except TimeoutError:
        record.error = f"no complete response within timeout={timeout:g} s"
    except asyncio.CancelledError:
        record.interrupted = True
    record.end = time.perf_counter()


def _opens_message(choice: _Choice) -> bool:
    delta = choice.delta
    return (
        delta is not None
        and delta.role is not None
        and choice.finish_reason is None
        and not (delta.content or delta.reasoning_content or delta.tool_calls)
    )


def _message(error: Any) -> str:
    """Return the message of an OpenAI error object."""
    found = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(found).split())


def _reason(body: bytes) -> str:
    """Return the message of an error response."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return " ".join(body.decode("utf-8", "replace").split())
    return _message(found.get("error", found.get("detail", found)) if isinstance(found, dict) else found)
