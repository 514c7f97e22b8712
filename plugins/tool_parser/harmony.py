"""`tool_parser=harmony`: the messages of gpt-oss, each with a channel: reasoning, tool calls and the answer.

An answer is one message or several, such as `<|channel|>analysis<|message|>…<|end|>` and
`<|start|>assistant<|channel|>final<|message|>…`. The channel `analysis` has reasoning. A message to `functions.NAME` is
a tool call. The other messages are content. Source: https://github.com/openai/harmony (docs/format.md).
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.plugins.http.apis.answer import CallArguments, CallBegin, Content, Part, Reasoning, partial_length
from minisgl.plugins.tool_parser import ToolParser
from minisgl.sampling_params import InvalidRequestError

CHANNEL, MESSAGE, START, END, CALL = "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>"
MARKS = (CHANNEL, MESSAGE, START, END, CALL, "<|return|>", "<|constrain|>")
ENDS = (START, END, CALL, "<|return|>")
"""What ends the text of a message. The next message may begin without an end of the last one."""
HEADS = (CHANNEL, START, MESSAGE, "assistant", "to=")
"""What a header may begin with. An answer that begins with another text is content."""
MAX_HEADER = 256
"""The largest number of characters of a header."""
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([A-Za-z0-9_.-]+)")


@dataclass
class Harmony:
    """The messages of gpt-oss, each with a channel."""

    def build(self) -> ToolParser:
        return HarmonyParser()


def matches(template: str) -> bool:
    """Return whether a chat template writes messages in this form."""
    return CHANNEL in template and MESSAGE in template


class HarmonyParser:
    """Reads these messages, also those of chats without tools. No grammar allows a special token of a call."""

    special: Sequence[str] = MARKS
    reads_all = True

    def reader(self, tools: Collection[str], most: int | None, forced: bool) -> HarmonyReader:
        return HarmonyReader(tools, most)

    def frame(self, tools: Sequence[tuple[str, Any]], most: int | None) -> Any:
        message = (
            "A call can't be forced, nor a grammar be used beside tools, with this model: its answers begin with "
            "special tokens, which no grammar allows."
        )
        raise InvalidRequestError("tool_choice", message, "unsupported_parameter")


class HarmonyReader:
    """Reads the messages of one answer. ``thinks``: what is in the channel ``analysis`` is reasoning, not content."""

    def __init__(self, tools: Collection[str], most: int | None, thinks: bool = False):
        self._tools, self._most, self.thinks = tools, most, thinks
        self._buffer, self._in_header = "", True
        self._kind: type[Content] | type[Reasoning] | None = Content  # of the message that is read; None: a call
        self._is_first, self._num_calls, self._has_arguments = True, 0, False
        self._given: set[type] = set()  # the kinds of parts of earlier messages
        self._is_new = False  # no text of the message was returned yet

    def feed(self, text: str) -> list[Part]:
        """Return the parts that are known after the next text."""
        self._buffer += text
        parts: list[Part] = []
        while self._buffer and (self._header(parts) if self._in_header else self._text(parts)):
            pass
        return parts

    def finish(self) -> list[Part]:
        """Return the rest. A header without a text is dropped."""
        parts: list[Part] = []
        if not self._in_header:
            self._emit(self._buffer, parts)
            self._end(parts)
        elif self._is_first and not self._buffer.lstrip().startswith((CHANNEL, START)):
            self._emit(self._buffer, parts)
        self._buffer = ""
        return parts

    def _header(self, parts: list[Part]) -> bool:
        """Read up to the text of a message: its channel, and its recipient."""
        at = self._buffer.find(MESSAGE, 0, MAX_HEADER + len(MESSAGE))
        begin = self._buffer.lstrip()
        could_be = any(begin.startswith(head) or head.startswith(begin) for head in HEADS)
        if (self._is_first and not could_be) or (at < 0 and len(self._buffer) >= MAX_HEADER + len(MESSAGE)):
            self._begin("", parts)  # it is a text
            return True
        if at < 0:
            return False
        header, self._buffer = self._buffer[:at], self._buffer[at + len(MESSAGE) :]
        self._begin(header, parts)
        return True

    def _begin(self, header: str, parts: list[Part]) -> None:
        """Begin the text of a message."""
        self._in_header, self._is_first, self._is_new, self._has_arguments = False, False, True, False
        recipient = RECIPIENT.search(header)
        if recipient is not None and recipient[1] in self._tools:
            self._kind, self._num_calls = None, self._num_calls + 1
            if self._counts:
                parts.append(CallBegin(self._num_calls - 1, f"call_{uuid.uuid4().hex[:24]}", recipient[1]))
        else:
            self._kind = Reasoning if self.thinks and f"{CHANNEL}analysis" in header else Content

    def _text(self, parts: list[Part]) -> bool:
        """Read the text of a message up to its end. Hold back what may be the beginning of an end."""
        found = [at for at in map(self._buffer.find, ENDS) if at >= 0]
        if not found:
            end = len(self._buffer) - partial_length(self._buffer, *ENDS)
            self._emit(self._buffer[:end], parts)
            self._buffer = self._buffer[end:]
            return False
        at = min(found)
        self._emit(self._buffer[:at], parts)
        self._end(parts)
        mark = next(mark for mark in ENDS if self._buffer.startswith(mark, at))
        self._buffer = self._buffer[at + len(mark) :]
        self._in_header = True
        return True

    def _emit(self, text: str, parts: list[Part]) -> None:
        """Add the next text of the message."""
        if not text:
            return
        if self._kind is None:
            self._has_arguments = True
            if self._counts:
                parts.append(CallArguments(self._num_calls - 1, text))
            return
        if self._is_new and self._kind in self._given:
            text = f"\n{text}"
        self._is_new = False
        self._given.add(self._kind)
        parts.append(self._kind(text))

    def _end(self, parts: list[Part]) -> None:
        """End the message. A call without arguments has an empty object."""
        if self._kind is None and not self._has_arguments:
            self._emit("{}", parts)

    @property
    def _counts(self) -> bool:
        return self._most is None or self._num_calls <= self._most


@hookimpl
def minisgl_configs() -> Any:
    yield "tool_parser", "harmony", Harmony
