"""The parts of an answer, and what reads them: its text becomes *parts*, as it streams.

Models write reasoning and tool calls as text, in a form that depends on their family. An `AnswerReader` turns this text
into parts. Plugins have the readers, and so only they know families of models; `minisgl.plugins.http.tools` chooses the
reader of each chat. Without one, all text is content.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text that the model wrote before its answer, to think."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A tool call begins: the call number ``index`` of the answer, from 0. ``id`` is unique."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next piece of the arguments of the call ``index``. The pieces are together the text of a JSON object.

    The text is not complete, or no JSON, if the answer was cut or the model made a mistake.
    """

    index: int
    text: str


Part: TypeAlias = Content | Reasoning | CallBegin | CallArguments


class AnswerReader(Protocol):
    """Reads the answer of one choice. The parts do not depend on where the text is split, but for their own splits."""

    def feed(self, text: str) -> list[Part]:
        """Return the parts that are known after the next text. Text that may belong to a form is held back."""

    def finish(self) -> list[Part]:
        """Return the parts of the text that was held back. Called once, after the last text. It never fails."""


class PlainReader:
    """Reads answers of which all text is content."""

    def feed(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        return []


def partial_length(text: str, *marks: str) -> int:
    """Return the length of the longest end of ``text`` that is the beginning of one of ``marks``, but not all of it."""
    lengths = range(min(len(text), max(map(len, marks)) - 1), 0, -1)
    return next((n for n in lengths if any(len(m) > n and m.startswith(text[-n:]) for m in marks)), 0)
