"""Responses of ``POST /v1/responses``: the items of an answer, and the events that tell of them as they grow.

`Items` turns the parts of an answer into items. A full response is the items at the end; a stream is the events on the
way, so both have the same content. Source: the reference of OpenAI's Responses API.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from minisgl.core import Finished
from minisgl.plugins.http.apis.answer import CallArguments, CallBegin, Content, Part, Reasoning
from minisgl.plugins.http.apis.full_answer import FullBuilder, full_choice
from minisgl.plugins.http.apis.responses_request import ENCRYPTED, ResponsesRequest, seal
from minisgl.sampling_params import SamplingParams
from minisgl.server.errors import ApiError
from minisgl.server.generate import Choice

Event = dict[str, Any]
_DEFAULTS = SamplingParams()


def new_id(kind: str) -> str:
    """Return a new id, which can't be guessed: it is the key of a stored response."""
    return f"{kind}_{uuid.uuid4().hex}"


class Items:
    """The items of an answer, made of its parts. At most one item is open at a time, the last.

    ``custom_tools`` are the tools whose calls are custom calls. ``sealed`` adds the encrypted content to reasoning.
    """

    def __init__(self, custom_tools: frozenset[str] = frozenset(), sealed: bool = False):
        self._custom_tools, self._sealed = custom_tools, sealed
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._arguments = ""  # of an open call
        self._logprobs: list[Any] = []  # of tokens whose text has not come

    def feed(self, parts: Sequence[Part], logprobs: Sequence[Any] = ()) -> list[Event]:
        """Add parts, and the log-probabilities of their tokens. Return the events."""
        events: list[Event] = []
        self._logprobs += logprobs
        for part in parts:
            match part:
                case Content(text):
                    events += self._text(text, "message", "output_text")
                case Reasoning(text):
                    events += self._text(text, "reasoning", "reasoning_text")
                case CallBegin(_, call_id, name):
                    events += [*self.close(), *self._begin_call(call_id, name)]
                case CallArguments(_, text):
                    events += self._call_arguments(text)
        return events

    def finish(self, status: str) -> list[Event]:
        """End the answer. An answer without any item is an empty message. ``status`` is that of the last item."""
        events = [] if self.items else self._begin_text("message", "output_text")
        return events + self.close(status)

    def close(self, status: str = "completed") -> list[Event]:
        """Close the open item, if there is one. Return the events."""
        item, self._open = self._open, None
        if item is None:
            return []
        item["status"] = status
        match item["type"]:
            case "message" | "reasoning":
                events = self._end_text(item)
            case "custom_tool_call":
                item["input"] = _custom_input(self._arguments)
                events = [self._of(item, "response.custom_tool_call_input.delta", delta=item["input"])]
                events += [self._of(item, "response.custom_tool_call_input.done", input=item["input"])]
            case _:
                item["arguments"] = self._arguments
                done = {"name": item["name"], "arguments": self._arguments}
                events = [self._of(item, "response.function_call_arguments.done", **done)]
        return [*events, self._item_event("response.output_item.done", item)]

    def _text(self, text: str, item_type: str, part_type: str) -> list[Event]:
        """Add text to the open item, or to a new one if the open one is of another type."""
        events: list[Event] = []
        if self._open is None or self._open["type"] != item_type:
            events = [*self.close(), *self._begin_text(item_type, part_type)]
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        more = {}
        if item_type == "message":
            more = {"logprobs": self._logprobs}
            part["logprobs"] += self._logprobs
            self._logprobs = []
        return [*events, self._of(self._open, f"response.{part_type}.delta", content_index=0, delta=text, **more)]

    def _begin_text(self, item_type: str, part_type: str) -> list[Event]:
        part: dict[str, Any] = {"type": part_type, "text": ""}
        if item_type == "message":
            part |= {"annotations": [], "logprobs": []}
            item: dict[str, Any] = {
                "id": new_id("msg"),
                "type": "message",
                "status": "in_progress",
                "role": "assistant",
            }
        else:
            item = {"id": new_id("rs"), "type": "reasoning", "status": "in_progress", "summary": []}
        events = self._begin({**item, "content": []})
        self.items[-1]["content"].append(part)
        return [*events, self._of(self.items[-1], "response.content_part.added", content_index=0, part=dict(part))]

    def _end_text(self, item: dict[str, Any]) -> list[Event]:
        part = item["content"][0]
        name, more = f"response.{part['type']}.done", {}
        if item["type"] == "message":
            more = {"logprobs": part["logprobs"]}
        elif self._sealed:
            item["encrypted_content"] = seal(part["text"])
        return [
            self._of(item, name, content_index=0, text=part["text"], **more),
            self._of(item, "response.content_part.done", content_index=0, part=part),
        ]

    def _begin_call(self, call_id: str, name: str) -> list[Event]:
        self._arguments = ""
        custom = name in self._custom_tools
        item = {"id": new_id("ctc" if custom else "fc"), "type": "custom_tool_call" if custom else "function_call"}
        item |= {"status": "in_progress", "call_id": call_id, "name": name, "input" if custom else "arguments": ""}
        return self._begin(item)

    def _call_arguments(self, text: str) -> list[Event]:
        assert self._open is not None
        self._arguments += text
        if self._open["type"] == "custom_tool_call":  # its input is known when its JSON is complete
            return []
        return [self._of(self._open, "response.function_call_arguments.delta", delta=text)]

    def _begin(self, item: dict[str, Any]) -> list[Event]:
        self._open = item
        self.items.append(item)
        added = {**item, "content": []} if "content" in item else dict(item)
        return [self._item_event("response.output_item.added", added)]

    def _of(self, item: dict[str, Any], event: str, /, **fields: Any) -> Event:
        return {"type": event, "item_id": item["id"], "output_index": len(self.items) - 1, **fields}

    def _item_event(self, name: str, item: dict[str, Any]) -> Event:
        return {"type": name, "output_index": len(self.items) - 1, "item": item}


def _custom_input(arguments: str) -> str:
    """Return the input of a custom call from the arguments of its function. Arguments that are wrong are the input."""
    try:
        value = json.loads(arguments)["input"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return arguments
    return value if isinstance(value, str) else arguments


class ResponsesBuilder(FullBuilder):
    """Builds the response to one body. ``keep(response)`` is called with a response that has completed.

    ``defaults`` are the values of sampling parameters that the body leaves out. ``rename`` returns an error in the
    client's words.
    """

    def __init__(
        self,
        model: str,
        body: ResponsesRequest,
        defaults: Mapping[str, Any],
        rename: Callable[[ApiError], ApiError],
        store: bool = False,
        keep: Callable[[dict[str, Any]], None] = lambda response: None,
    ):
        super().__init__(model=model, include_usage=True)
        self.id = new_id("resp")
        self._body, self._defaults, self._store, self._keep, self._rename = body, defaults, store, keep, rename
        self._items = Items(body.custom_tools, ENCRYPTED in body.include)
        self._sequence = 0

    def full(self, choices: Sequence[Choice]) -> dict[str, Any]:
        (choice,) = choices
        self._feed(choice)
        self._items.finish(_status(choice.finish))
        return self._finished(choice.finish)

    def first_chunk(self, index: int) -> dict[str, Any]:
        response = self._response("in_progress")
        return _chunk([{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")])

    def chunk(self, choice: Choice) -> dict[str, Any]:
        return _chunk(self._feed(choice))

    def end(self, ends: Sequence[Finished | None]) -> bytes:
        status = _status(ends[0])
        events = self._items.finish(status)
        last = {"type": f"response.{status}", "response": self._finished(ends[0])}
        return self.encode([_chunk([*events, last])])

    def error(self, error: ApiError) -> dict[str, Any]:
        error = self._rename(error)
        kinds = {429: "rate_limit_exceeded"}
        code = kinds.get(error.status, "server_error" if error.status >= 500 else error.code or "invalid_prompt")
        self._items.close("incomplete")
        failed = {**self._response("failed"), "error": {"code": code, "message": error.message}}
        return _chunk([{"type": "response.failed", "response": failed}])

    def encode(self, events: Sequence[dict[str, Any] | None]) -> bytes:
        """Return events as they are sent, with their names and numbers. One chunk is several events."""
        found = []
        for event in (event for chunk in events if chunk is not None for event in chunk["events"]):
            data = msgspec.json.encode({**event, "sequence_number": self._sequence})
            found.append(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data))
            self._sequence += 1
        return b"".join(found)

    def _feed(self, choice: Choice) -> list[Event]:
        output = full_choice(choice)
        self.reasoning_tokens += output.reasoning_tokens
        return self._items.feed(output.parts, self.format_logprobs(choice)["content"] if output.logprobs else ())

    def _finished(self, end: Finished | None) -> dict[str, Any]:
        response = self._response(_status(end))
        if response["status"] == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        usage = self.usage([end])
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
        response["completed_at"] = int(time.time())
        self._keep(response)
        return response

    def _response(self, status: str) -> dict[str, Any]:
        """Return the object of the response as it is now. What the client asked for is part of it."""
        body = self._body
        given = {name: getattr(body, name) for name in ("user", "safety_identifier", "prompt_cache_key")}

        def effective(name: str) -> Any:
            value = getattr(body, name)
            return self._defaults.get(name, getattr(_DEFAULTS, name)) if value is None else value

        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata,
            "model": self.model,
            "output": self._items.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.get("effort"), "summary": body.reasoning.get("summary")},
            "service_tier": "default",
            "store": self._store,
            "temperature": effective("temperature"),
            "text": {"format": {"type": "text"}, **body.text},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools,
            "top_logprobs": body.top_logprobs or 0,
            "top_p": effective("top_p"),
            "truncation": "disabled",
            "usage": None,
            **{name: value for name, value in given.items() if value is not None},
        }


def _chunk(events: list[Event]) -> dict[str, Any]:
    return {"events": events}


def _status(end: Finished | None) -> str:
    return "incomplete" if end is not None and end.finish_reason == "length" else "completed"
