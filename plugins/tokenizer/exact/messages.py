"""Chat messages in the forms that chat templates read, and marks in them.

`normalize` converts the messages that clients send. The functions below it return other forms of the same messages, for
templates that can't read the first form.

`TextMarks` finds the texts of a chat that its template did not write. The template renders a second copy of the
messages, in which private characters replace one or two characters of each text, a different one for each text. A text
was written if its marks are in the result. A private character is one character too, so the template trims, cuts,
encodes and measures the marked text as it does the client's text.

This module knows nothing about Jinja, and nothing about any template.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from minisgl.sampling_params import InvalidRequestError, shorten
from minisgl.tokenizer import chat
from minisgl.tokenizer.chat import Message
from minisgl.utils.json_file import is_neutral

REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names of an assistant's reasoning. A template reads the first, or the second (gpt-oss)."""
_TYPES = ("text", "function")
_PRIVATE = re.compile("[\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
_FIRST = re.compile("[0-9A-Za-z]")  # JSON escapes no ASCII letter or digit, and no template trims them
_LAST = re.compile("(?s:.*)[0-9A-Za-z]")
_WINDOW = 512
_MAX_SEARCHES = 64


class TextPart(dict[str, Any]):
    """A content part ``{"type": "text", "text": …}``. It can't be converted to a string.

    So a template that reads only strings fails for a list of parts, and does not write Python's form of the list.
    """

    def __repr__(self) -> str:
        raise TypeError("the content is a list of parts")


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


def normalize(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages in the form that templates read.

    A null field is a missing field, as in `transformers`. A part of a content is a `TextPart`, and a reasoning text has
    all names under which templates read it. Raise `InvalidRequestError` for a content that is no text, for a field of a
    part that would have no effect, and for arguments of a tool call that JSON allows but that have several meanings.
    The arguments of a tool call are an object: `Arguments` if the client gave a string.
    """
    for i, message in enumerate(messages):
        if isinstance(content := message.get("content"), list | tuple):
            for part in content:
                _check_part(part, i)
    plain = [dict(message) for message in messages]
    for i, changed in enumerate(plain):
        if changed.get("content") is not None:
            changed["content"] = _content(changed["content"], i)
    found = []
    for i, (changed, given) in enumerate(zip(plain, messages, strict=True)):
        calls = [_tool_call(call, i) for call in given.get("tool_calls") or ()]
        both = {**changed, "tool_calls": calls or given.get("tool_calls")}
        message = {name: both[name] for name in given if both.get(name) is not None}
        for call, given_call in zip(message.get("tool_calls") or (), given.get("tool_calls") or (), strict=True):
            _keep_arguments(call, given_call, i)
        if isinstance(content := message.get("content"), list):
            message["content"] = [TextPart(part) for part in content]
        found.append(_with_reasoning(message, i))
    return found


def _content(content: Any, i: int) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        chat.refuse(i, "the content must be a string or a list of content parts")
    return [_part(part, i) for part in content] or ""


def _part(part: Any, i: int) -> dict[str, str]:
    if isinstance(part, Mapping) and part.get("type") != "text":
        chat.refuse(i, f"a content part of type {reprlib.repr(part.get('type'))} is not supported, only 'text'")
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        chat.refuse(i, "a content part must be {'type': 'text', 'text': '…'}")
    return {"type": "text", "text": part["text"]}


def as_string(message: Message) -> Message:
    """Return a message whose content is a string: the texts of its parts, joined with line breaks."""
    if not isinstance(message.get("content"), list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in message["content"])}


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with ``change(text)`` in place of each of its strings, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key) if isinstance(key, str) else key: map_strings(item, change) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [map_strings(item, change) for item in value]
    return value


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


def _tool_call(call: Any, i: int) -> Any:
    """Return a tool call whose arguments, a JSON string, are an object."""
    if not isinstance(call, Mapping):
        chat.refuse(i, "a tool call must be an object")
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": _with_arguments(function, i)}
    return _with_arguments(call, i)


def _with_arguments(function: Mapping[str, Any], i: int) -> dict[str, Any]:
    given = function.get("arguments")
    if not isinstance(given, str):
        return dict(function)
    try:
        value = json.loads(given or "{}")
    except (ValueError, RecursionError) as error:
        _refuse_arguments(i, function, f"are not valid JSON ({shorten(str(error), 60)})")
    if not isinstance(value, dict):
        _refuse_arguments(i, function, "must be a JSON object in a string")
    return {**function, "arguments": value}


def _refuse_arguments(i: int, function: Mapping[str, Any], what: str) -> NoReturn:
    """Raise `InvalidRequestError` for the arguments of a tool call in the message number ``i``."""
    chat.refuse(i, f"the arguments of the tool call {shorten(reprlib.repr(function.get('name')), 60)} {what}")


def _keep_arguments(call: dict[str, Any], given_call: Mapping[str, Any], i: int) -> None:
    """Make the arguments of a normalized tool call `Arguments`, if the client has given a string."""
    is_nested = isinstance(call.get("function"), Mapping)
    function, given = (call["function"], given_call["function"]) if is_nested else (call, given_call)
    if not isinstance(text := given.get("arguments"), str):
        return
    try:
        json.loads(text or "{}", object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite_float)
    except ValueError as error:
        _refuse_arguments(i, function, f"are not valid JSON ({shorten(str(error), 60)})")
    function["arguments"] = Arguments(text, function["arguments"])


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


# ---- marks -------------------------------------------------------------------------------------------


class PrivateCharacters:
    """Private Unicode characters that occur in none of ``texts``. `take` returns each of them once."""

    def __init__(self, texts: Iterable[str]):
        self._used = {character for text in texts if not text.isascii() for character in _PRIVATE.findall(text)}
        self._free = map(chr, itertools.chain(range(0x100000, 0x10FFFE), range(0xF0000, 0xFFFFE)))
        self.taken: set[str] = set()

    def take(self) -> str:
        """Return the next character. Raise `InvalidRequestError` if none is left."""
        for character in self._free:
            if character not in self._used:
                self.taken.add(character)
                return character
        raise InvalidRequestError(
            "messages", "The chat has too many texts, or too many private Unicode characters (131,068 of both)."
        )


@dataclass(frozen=True)
class Lost:
    """A text that the template did not write: the number of its message, and its field."""

    message: int
    field: str


@dataclass(frozen=True)
class _Needed:
    """A text, and the marks that show that it was written: all marks of one of ``options``."""

    message: int
    field: str
    text: str
    options: list[str]


class TextMarks:
    """Marked copies of messages.

    ``sought`` are texts that the template looks for: a mark inside of one would change what the template does.
    ``separators`` are those of them that divide an assistant's content. The template may drop all parts but the last,
    which follows the reasoning. ``checked`` are the fields of messages of which `lost` knows whether they are written.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        private: PrivateCharacters,
        sought: re.Pattern[str],
        separators: Collection[str] = (),
    ):
        self._private, self._sought, self._separators = private, sought, separators
        self._original: dict[str, str] = {}
        self._needed: list[_Needed] = []
        self.checked: set[tuple[int, str]] = set()
        self._called: set[str] = set()  # the names of the functions that earlier messages call
        self.messages = [self._mark_message(i, message) for i, message in enumerate(messages)]

    def remove(self, text: str) -> str:
        """Return a text with the client's characters in place of their marks."""
        return _PRIVATE.sub(lambda found: self._original.get(found[0], found[0]), text)

    def lost(self, marked: str, prompt: str, is_same: bool, restore: Callable[[str], str]) -> list[Lost]:
        """Return the texts that are not written. ``marked`` is the rendering of ``messages``.

        If the marks changed what the template did (``is_same`` is false), a text without its marks is sought in the
        prompt itself. ``restore`` returns a text without stand-ins.
        """
        present = set(_PRIVATE.findall(marked))
        missing = [needed for needed in self._needed if not any(map(present.issuperset, needed.options))]
        if not is_same:
            missing = [n for k, n in enumerate(missing) if k >= _MAX_SEARCHES or not _is_in(restore(n.text), prompt)]
        return [Lost(needed.message, needed.field) for needed in missing]

    # ---- marking -----------------------------------------------------------------------------------------

    def _mark_message(self, i: int, message: Message) -> dict[str, Any]:
        texts: list[tuple[str, str]] = []

        def collect(field: str, text: str) -> str:
            texts.append((field, text))
            return text

        map_texts(message, collect)
        for field, run in itertools.groupby(range(len(texts)), lambda k: texts[k][0]):
            filled = [k for k in run if texts[k][1].strip()]
            # A template that writes the last argument writes all arguments.
            for k in filled[-1:] if field == "arguments" else filled:
                texts[k] = (field, self._mark(i, message, field, texts[k][1]))
        marked = iter(texts)
        return map_texts(message, lambda field, text: next(marked)[1])

    def _mark(self, i: int, message: Message, field: str, text: str) -> str:
        """Return a text with its marks, and note that they are needed."""
        role = message.get("role")
        if field in ("id", "tool_call_id"):
            return text
        self.checked.add((i, "tool_calls" if field == "arguments" else field))
        if field == "tool_calls":
            self._called.add(text)
        if field == "name" and role == "tool" and text in self._called:
            return text  # the tool call that it answers has this name
        begin, needed = "", text
        if field == "content" and role == "assistant":
            cut = max((text.rfind(s) + len(s) for s in self._separators if s in text), default=0)
            begin, needed = text[:cut], text[cut:]
            if not needed.strip():
                return text
        marks, marked = "", needed
        places = {self._place(needed, True)} | ({self._place(needed, False)} if field == "content" else set())
        for place in places:
            mark = self._private.take()
            self._original[mark] = needed[place]
            marks, marked = marks + mark, f"{marked[:place]}{mark}{marked[place + 1 :]}"
        if field != "json":
            self._needed.append(_Needed(i, field, needed, [marks]))
        elif self._needed and (self._needed[-1].message, self._needed[-1].field) == (i, "arguments"):
            self._needed[-1].options.append(marks)  # the same arguments, as text
        return begin + marked

    def _place(self, text: str, is_last: bool) -> int:
        """Return the place of the last, or the first, character that a mark may replace."""
        part = text[-_WINDOW:] if is_last else text[:_WINDOW]
        blank = self._sought.sub(lambda found: " " * len(found[0]), part)
        if found := (_LAST.match(blank) if is_last else _FIRST.search(blank)):
            return len(text) - len(part) + found.end() - 1 if is_last else found.start()
        if found := (_LAST.match(text) if is_last else _FIRST.search(text)):
            return found.end() - 1
        return len(text.rstrip()) - 1 if is_last else len(text) - len(text.lstrip())


def _is_in(text: str, prompt: str) -> bool:
    """Return whether a text is in the prompt, as it is or as JSON."""
    text = text.strip()
    return text in prompt or json.dumps(text, ensure_ascii=False)[1:-1] in prompt
