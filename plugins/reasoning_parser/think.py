"""`reasoning_parser=think`: reasoning inside `<think>` and `</think>`: Qwen 3, QwQ, DeepSeek R1 and others.

Some templates write `<think>` at the end of the prompt, so that the answer begins within the reasoning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.plugins.http.apis.answer import AnswerReader, Part, Reasoning, partial_length
from minisgl.plugins.reasoning_parser import ReasoningParser

OPENER, CLOSER = "<think>", "</think>"


@dataclass
class Think:
    """Reasoning inside ``<think>`` and ``</think>``."""

    opened: bool = False
    """Whether an answer begins within the reasoning even if neither the prompt nor the answer has ``<think>``."""

    def build(self) -> ReasoningParser:
        return ThinkParser(self.opened)


class ThinkParser:
    """Reads this reasoning."""

    after, opener = CLOSER, OPENER

    def __init__(self, opened: bool):
        self._opened = opened

    def is_open(self, prompt: str) -> bool:
        return not self.is_closed(prompt) and (self._opened or prompt.rstrip().endswith(OPENER))

    def is_closed(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(CLOSER)

    def reader(self, is_open: bool, then: AnswerReader) -> AnswerReader:
        return ThinkReader(is_open, then)


class ThinkReader:
    """Reads the reasoning, without the white space around it."""

    def __init__(self, is_open: bool, then: AnswerReader):
        self._is_open, self._then = is_open, then
        self._state, self._buffer = "start", ""

    def feed(self, text: str) -> list[Part]:
        """Return the parts that are known after the next text."""
        self._buffer += text
        parts: list[Part] = []
        if self._state == "start":
            self._start()
        if self._state == "reasoning":
            parts += self._reasoning()
        if self._state == "space":
            self._buffer = self._buffer.lstrip()
            self._state = "then" if self._buffer else "space"
        if self._state == "then" and self._buffer:
            parts += self._then.feed(self._buffer)
            self._buffer = ""
        return parts

    def finish(self) -> list[Part]:
        """Return the rest: an answer may end within the reasoning."""
        parts: list[Part] = []
        if self._state == "reasoning" and self._buffer.strip():
            parts.append(Reasoning(self._buffer))
        elif self._state == "start":
            text = self._buffer
            parts += ([Reasoning(text)] if self._is_open and text.strip() else []) or self._then.feed(text)
        self._buffer = ""
        return parts + self._then.finish()

    def _start(self) -> None:
        text = self._buffer.lstrip()
        if text.startswith(OPENER):
            self._buffer, self._state = text.removeprefix(OPENER), "reasoning"
        elif not OPENER.startswith(text):
            self._state = "reasoning" if self._is_open else "then"

    def _reasoning(self) -> list[Part]:
        """Return the reasoning up to the closer. White space at its end is held back, since a closer may follow."""
        if self._is_first:
            self._buffer = self._buffer.lstrip()
        at = self._buffer.find(CLOSER)
        end = at if at >= 0 else len(self._buffer) - partial_length(self._buffer, CLOSER)
        text = self._buffer[:end].rstrip()
        if at >= 0:
            self._buffer, self._state = self._buffer[at + len(CLOSER) :], "space"
        else:
            self._buffer = self._buffer[len(text) :]
        self._is_first = self._is_first and not text
        return [Reasoning(text)] if text else []

    _is_first = True  # no reasoning was returned yet


@hookimpl
def minisgl_configs() -> Any:
    yield "reasoning_parser", "think", Think
