"""Responses of ``POST /v1/messages``: the blocks of an answer, and the events that tell of them as they grow.

`Blocks` turns the parts of an answer into blocks. A full response is the blocks at the end; a stream is the events on
the way, so both have the same content. Source: the reference of Anthropic's Messages API.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from minisgl.core import Finished
from minisgl.plugins.http.apis.answer import CallArguments, CallBegin, Content, Part, Reasoning
from minisgl.plugins.http.apis.full_answer import FullBuilder, FullChoice, full_choice
from minisgl.server.errors import ApiError
from minisgl.server.generate import Choice

Event = dict[str, Any]
ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
"""HTTP status → type of the error. Others are ``invalid_request_error`` below 500, and ``api_error`` from 500."""
SIGNATURE = "minisgl"
"""The signature of a thinking block. Clients drop blocks without one, although nothing needs to be verified here."""


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return the body of an error response. Its text names the parameter, which has no field of its own here."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if error.code == "context_length_exceeded":  # clients look for these words
        message = f"prompt is too long: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


class Blocks:
    """The content blocks of an answer, made of its parts. At most one block is open at a time, the last."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._arguments = ""  # of an open tool_use block

    def feed(self, parts: Sequence[Part]) -> list[Event]:
        """Add parts. Return the events."""
        events: list[Event] = []
        for part in parts:
            match part:
                case Content(text):
                    events += self._text("text", "text", text)
                case Reasoning(text):
                    events += self._text("thinking", "thinking", text)
                case CallBegin(_, call_id, name):
                    events += self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})
                    self._arguments = ""
                case CallArguments(_, text):
                    self._arguments += text
                    events += [self._delta({"type": "input_json_delta", "partial_json": text})]
        return events

    def close(self) -> list[Event]:
        """Close the open block, if there is one. Return the events."""
        block, self._open = self._open, None
        if block is None:
            return []
        events = []
        if block["type"] == "tool_use":
            block["input"] = _input(self._arguments)
        elif block["type"] == "thinking":
            block["signature"] = SIGNATURE
            events = [self._delta({"type": "signature_delta", "signature": SIGNATURE})]
        return [*events, {"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _text(self, kind: str, field: str, text: str) -> list[Event]:
        """Add text to the open block, or to a new one if the open one is of another type."""
        events: list[Event] = []
        if self._open is None or self._open["type"] != kind:
            block = {"type": "text", "text": ""} if kind == "text" else {"type": kind, "thinking": "", "signature": ""}
            events = self._begin(block)
        assert self._open is not None
        self._open[field] += text
        return [*events, self._delta({"type": f"{kind}_delta", field: text})]

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        events = self.close()
        self._open = block
        self.blocks.append(block)
        return [
            *events,
            {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)},
        ]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object. Arguments that are no object are its entry ``invalid_json``."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"invalid_json": arguments}


class MessagesBuilder(FullBuilder):
    """Builds the response to one body. ``max_tokens`` is the client's limit. ``rename`` gives errors its words."""

    def __init__(self, model: str, request_id: str, max_tokens: int, rename: Callable[[ApiError], ApiError]):
        super().__init__(model=model, include_usage=True)
        self.id = f"msg_{request_id}"
        self._request_id, self._max_tokens, self._rename = request_id, max_tokens, rename
        self._blocks = Blocks()
        self._last = FullChoice(0)  # the last output, which knows how the answer ended

    def full(self, choices: Sequence[Choice]) -> dict[str, Any]:
        self._last = full_choice(choices[0])
        self._blocks.feed(self._last.parts)
        self._blocks.close()
        end = self._last.finish
        return {**self._message(), "content": self._blocks.blocks, **self._stop(end), "usage": self._usage(end)}

    def first_chunk(self, index: int) -> dict[str, Any]:
        return _chunk([{"type": "message_start", "message": self._message()}, {"type": "ping"}])

    def chunk(self, choice: Choice) -> dict[str, Any]:
        self._last = full_choice(choice)
        return _chunk(self._blocks.feed(self._last.parts))

    def end(self, ends: Sequence[Finished | None]) -> bytes:
        last = {"type": "message_delta", "delta": self._stop(ends[0]), "usage": self._usage(ends[0])}
        return self.encode([_chunk([*self._blocks.close(), last, {"type": "message_stop"}])])

    def error(self, error: ApiError) -> dict[str, Any]:
        return _chunk([error_body(self._rename(error), self._request_id)])

    def encode(self, events: Sequence[dict[str, Any] | None]) -> bytes:
        """Return events as they are sent, with their names. One chunk is several events."""
        every = [event for chunk in events if chunk is not None for event in chunk["events"]]
        return b"".join(
            b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event)) for event in every
        )

    def _message(self) -> dict[str, Any]:
        """Return the message without its content. The tokens of the prompt are known at the end of a stream."""
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": []}
        return {**head, "stop_reason": None, "stop_sequence": None, "usage": self._usage(None)}

    def _stop(self, end: Finished | None) -> dict[str, Any]:
        """Return why the answer ended."""
        assert end is not None
        if self._last.matched_stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": self._last.matched_stop}
        if end.finish_reason == "length":
            is_limit = end.output_tokens >= self._max_tokens
            return {"stop_reason": "max_tokens" if is_limit else "model_context_window_exceeded", "stop_sequence": None}
        return {"stop_reason": "tool_use" if self._last.has_calls else "end_turn", "stop_sequence": None}

    def _usage(self, end: Finished | None) -> dict[str, Any]:
        """Return the token counts. The cached tokens of the prompt are not among its ``input_tokens``."""
        end = end or Finished(0, "stop")
        return {
            "input_tokens": end.prompt_tokens - end.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": end.cached_tokens,
            "output_tokens": end.output_tokens,
        }


def _chunk(events: list[Event]) -> dict[str, Any]:
    return {"events": events}
