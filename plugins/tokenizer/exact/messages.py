"""Chat messages in the forms that chat templates read.

Clients send messages in the form of the OpenAI API. `normalize` converts them: a null field is a missing field, the
arguments of a tool call are an object, and a reasoning text has all names under which templates read it. The functions
below it return other forms of the same messages, for templates that can't read the first form.

This module knows nothing about Jinja, and nothing about any template.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from minisgl.core import InvalidRequestError, shorten

Message = Mapping[str, Any]
REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names of an assistant's reasoning. A template reads the first, or the second (gpt-oss)."""
_TYPES = ("text", "function")


class Arguments(dict[str, Any]):
    """The arguments of a tool call: an object, which is written as the client's own JSON wherever text is expected.

    So a template may encode the arguments (``arguments | tojson``), iterate over them, or write them as a string.
    """

    def __init__(self, json_text: str, value: Mapping[str, Any]):
        super().__init__(value)
        self._json_text = json_text  # templates can't read a name with an underscore

    def __str__(self) -> str:
        return self._json_text

    def __add__(self, other: str) -> str:
        return self._json_text + other

    def __radd__(self, other: str) -> str:
        return other + self._json_text


class TextPart(dict[str, Any]):
    """A content part ``{"type": "text", "text": …}``. It can't be converted to a string.

    So a template that reads only strings fails for a list of parts, and does not write Python's form of the list.
    """

    def __repr__(self) -> str:
        raise TypeError("the content is a list of parts")


def normalize(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages in the form that templates read. Raise `InvalidRequestError` for a wrong content or call.

    Fields with the value None are left out, as `transformers` does.
    """
    found = []
    for i, message in enumerate(messages):
        new = {name: value for name, value in message.items() if value is not None}
        if "content" in new:
            new["content"] = _content(new["content"], i)
        if new.get("tool_calls"):
            new["tool_calls"] = [_tool_call(call, i) for call in new["tool_calls"]]
        found.append(_with_reasoning(new, i))
    return found


def _with_reasoning(message: dict[str, Any], i: int) -> dict[str, Any]:
    """Return a message that has its reasoning under all names that templates read."""
    given = {name: message[name] for name in REASONING if message.get(name)}
    if not given:
        return message
    if len({str(text) for text in given.values()}) > 1:
        _refuse(i, f"{' and '.join(given)} are names of one text, but differ")
    text = next(iter(given.values()))
    return {"thinking": text, **message, "reasoning_content": text}


def _content(content: Any, i: int) -> str | list[TextPart]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        _refuse(i, "the content must be a string or a list of content parts")
    return [_part(part, i) for part in content] or ""


def _part(part: Any, i: int) -> TextPart:
    if not isinstance(part, Mapping):
        _refuse(i, "a content part must be {'type': 'text', 'text': '…'}")
    if part.get("type") != "text":
        _refuse(i, f"a content part of type {reprlib.repr(part.get('type'))} is not supported, only 'text'")
    used = {name for name, value in part.items() if not is_neutral(value)} | {"text"}
    if used != {"type", "text"} or not isinstance(part.get("text"), str):
        _refuse(i, "a content part must be {'type': 'text', 'text': '…'}")
    return TextPart(type="text", text=part["text"])


def _tool_call(call: Any, i: int) -> Any:
    """Return a tool call whose arguments, a JSON string, are an object."""
    if not isinstance(call, Mapping):
        _refuse(i, "a tool call must be an object")
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": _with_arguments(function, i)}
    return _with_arguments(call, i)


def _with_arguments(function: Mapping[str, Any], i: int) -> dict[str, Any]:
    given = function.get("arguments")
    if not isinstance(given, str):
        return dict(function)
    try:
        value = json.loads(
            given or "{}", object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite_float
        )
    except (ValueError, RecursionError) as error:
        _refuse(i, f"the arguments of the tool call {_name(function)} are not valid JSON ({shorten(str(error), 60)})")
    if not isinstance(value, dict):
        _refuse(i, f"the arguments of the tool call {_name(function)} must be a JSON object in a string")
    return {**function, "arguments": Arguments(given, value)}


def _name(function: Mapping[str, Any]) -> str:
    return shorten(reprlib.repr(function.get("name")), 60)


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


def _refuse(i: int, what: str) -> NoReturn:
    raise InvalidRequestError("messages", f"messages[{i}]: {what}.")


def is_neutral(value: Any) -> bool:
    """Return whether a field's value asks for nothing: null, false, or an empty string, list or object."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


# ---- other forms of the same messages ----------------------------------------------------------------


def has_parts(message: Message) -> bool:
    """Return whether the content of a message is a list of parts."""
    return isinstance(message.get("content"), list)


def as_string(message: Message) -> Message:
    """Return a message whose content is a string: the texts of its parts, joined with line breaks."""
    if not has_parts(message):
        return message
    return {**message, "content": "\n".join(part["text"] for part in message["content"])}


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


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with ``change(text)`` in place of each of its strings, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key) if isinstance(key, str) else key: map_strings(item, change) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [map_strings(item, change) for item in value]
    return value


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
