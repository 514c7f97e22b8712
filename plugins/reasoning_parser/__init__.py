"""How models write what they think: the group ``reasoning_parser`` and its interface, `ReasoningParser`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from minisgl.plugins.http.apis.answer import AnswerReader

__all__ = ["ReasoningParser"]


class ReasoningParser(Protocol):
    """What a plugin of the group ``reasoning_parser`` builds.

    ``after`` is the token that ends the reasoning, and ``opener`` the one that begins it. An empty ``after``: there is
    no such token, so that an answer can't follow a grammar.
    """

    after: str
    opener: str

    def is_open(self, prompt: str) -> bool:
        """Return whether an answer begins within the reasoning. ``prompt`` is the end of the rendered chat."""

    def is_closed(self, prompt: str) -> bool:
        """Return whether an answer has no reasoning, since the end of the chat says that it is over."""

    def reader(self, is_open: bool, then: AnswerReader) -> AnswerReader:
        """Return a reader of one answer, which gives the text after the reasoning to ``then``."""
