"""`reasoning_parser=harmony`: the channel `analysis` of gpt-oss's messages.

`tool_parser=harmony` reads the messages, so it must be selected, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.plugins.http.apis.answer import AnswerReader
from minisgl.plugins.reasoning_parser import ReasoningParser


@dataclass
class Harmony:
    """The channel ``analysis`` of messages."""

    def build(self) -> ReasoningParser:
        return HarmonyReasoning()


class HarmonyReasoning:
    """Tells the reader of messages to read reasoning. There is no token after which a grammar could begin."""

    after, opener = "", ""

    def is_open(self, prompt: str) -> bool:
        return False

    def is_closed(self, prompt: str) -> bool:
        return False

    def reader(self, is_open: bool, then: AnswerReader) -> AnswerReader:
        """Return ``then``, which reads the messages, and from now on also reasoning."""
        if hasattr(then, "thinks"):
            then.thinks = True
        return then


@hookimpl
def minisgl_configs() -> Any:
    yield "reasoning_parser", "harmony", Harmony
