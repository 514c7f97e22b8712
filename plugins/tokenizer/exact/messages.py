"""Chat messages in the forms that chat templates read.

`normalize` converts the messages that clients send. The functions below it return other forms of the same messages, for
templates that can't read the first form.

This module knows nothing about Jinja, and nothing about any template.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from minisgl.core import shorten
from minisgl.tokenizer import chat
from minisgl.tokenizer.chat import Arguments, Message, map_strings
from minisgl.utils.json_file import is_neutral

REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names of an assistant's reasoning. A template reads the first, or the second (gpt-oss)."""
_TYPES = ("text", "function")


class TextPart(dict[str, Any]):
    """A content part ``{"type": "text", "text": …}``. It can't be converted to a string.

    So a template that reads only strings fails for a list of parts, and does not write Python's form of the list.
    """

    def __repr__(self) -> str:
        raise TypeError("the content is a list of parts")


def normalize(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages in the form that templates read: see `minisgl.tokenizer.chat.normalize`.

    A part of a content is a `TextPart`, and a reasoning text has all names under which templates read it. Raise
    `InvalidRequestError` also for a field of a part that would have no effect, and for arguments of a tool call that
    JSON allows but that have several meanings.
    """
    for i, message in enumerate(messages):
        if isinstance(content := message.get("content"), list | tuple):
            for part in content:
                _check_part(part, i)
    found = []
    for i, message in enumerate(chat.normalize(messages)):
        for call in message.get("tool_calls") or ():
            _check_arguments(call, i)
        if isinstance(content := message.get("content"), list):
            message["content"] = [TextPart(part) for part in content]
        found.append(_with_reasoning(message, i))
    return found


def _with_reasoning(message: dict[str, Any], i: int) -> dict[str, Any]:
    """Return a message that has its reasoning under all names that templates read."""
    given = {name: message[name] for name in REASONING if message.get(name)}
    if not given:
        return message
    if len({str(text) for text in given.values()}) > 1:
        chat.refuse(i, f"{' and '.join(given)} are names of one text, but differ")
    text = next(iter(given.values()))
    return {"thinking": text, **message, "reasoning_content": text}


def _check_part(part: Any, i: int) -> None:
    used = {name for name, value in part.items() if not is_neutral(value)} if isinstance(part, Mapping) else set()
    if used - {"type", "text"} and part.get("type") == "text":
        chat.refuse(i, "a content part must be {'type': 'text', 'text': '…'}")


def _check_arguments(call: Mapping[str, Any], i: int) -> None:
    function = call["function"] if isinstance(call.get("function"), Mapping) else call
    if not isinstance(given := function.get("arguments"), chat.Arguments):
        return
    try:
        json.loads(
            str(given) or "{}", object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite_float
        )
    except ValueError as error:
        chat.refuse_arguments(i, function, f"are not valid JSON ({shorten(str(error), 60)})")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _finite_float(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{shorten(text, 20)} is too large")
    return value


# ---- other forms of the same messages ----------------------------------------------------------------


def has_parts(message: Message) -> bool:
    """Return whether the content of a message is a list of parts."""
    return isinstance(message.get("content"), list)


def as_parts(message: Message) -> Message:
    """Return a message whose content is a list of text parts."""
    if not isinstance(content := message.get("content"), str):
        return message
    return {**message, "content": [TextPart(type="text", text=content)]}


def as_system(message: Message) -> Message:
    """Return a developer's message as a system message."""
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def map_texts(message: Message, change: Callable[[str, str], str]) -> dict[str, Any]:
    """Return a message with ``change(field, text)`` in place of each text that the client chose.

    These are the contents, names, identifiers, the names and arguments of tool calls, and the strings of other fields.
    Roles, types and the names of fields are not changed, because templates compare them.
    """
    changed: dict[str, Any] = {}
    for field, value in message.items():
        if field == "role":
            changed[field] = value
        elif isinstance(value, str):
            changed[field] = change(field, value)
        elif field == "content" and isinstance(value, list):
            changed[field] = [TextPart(part, text=change(field, part["text"])) for part in value]
        elif field == "tool_calls":
            changed[field] = [_map_fields(call, change) for call in value]
        else:
            changed[field] = map_strings(value, lambda text, field=field: change(field, text))  # type: ignore[misc]
    return changed


def _map_fields(fields: Any, change: Callable[[str, str], str]) -> Any:
    """Map the strings of a tool call, whose own fields keep their names."""
    if not isinstance(fields, Mapping):
        return map_strings(fields, lambda text: change("tool_calls", text))
    changed = {}
    for name, value in fields.items():
        if isinstance(value, Arguments):
            mapped = map_strings(dict(value), lambda text: change("arguments", text))
            changed[name] = Arguments(change("json", str(value)), mapped)
        elif name == "arguments":
            changed[name] = map_strings(value, lambda text: change("arguments", text))
        elif isinstance(value, Mapping):
            changed[name] = _map_fields(value, change)
        elif name == "type" and value in _TYPES:
            changed[name] = value
        else:
            field = "id" if name == "id" else "tool_calls"
            changed[name] = map_strings(value, lambda text, field=field: change(field, text))  # type: ignore[misc]
    return changed


def texts_of(messages: Iterable[Message]) -> list[str]:
    """Return all texts of messages that `map_texts` changes."""
    found: list[str] = []

    def collect(field: str, text: str) -> str:
        found.append(text)
        return text

    for message in messages:
        map_texts(message, collect)
    return found


def strings_of(value: Any) -> list[str]:
    """Return all strings in a JSON value, keys included."""
    found: list[str] = []

    def collect(text: str) -> str:
        found.append(text)
        return text

    map_strings(value, collect)
    return found
