"""`tool_parser=llama3`: an answer that is one call as JSON, with `parameters`, as of Llama 3.1, 3.2 and 3.3.

`<|python_tag|>` may come before it. Several calls may follow each other, with `;` between. Source: the model card of
Llama 3.1 (https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1) and the chat templates of these models.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.plugins.tool_parser import ToolParser
from minisgl.plugins.tool_parser.calls import CallReader, JsonScan, call_frame

TAG = "<|python_tag|>"


@dataclass
class Llama3:
    """Answers that are calls as JSON, with ``parameters``, after ``<|python_tag|>`` or without it."""

    def build(self) -> ToolParser:
        return Llama3Parser()


def matches(template: str) -> bool:
    """Return whether a chat template writes calls in this form."""
    return TAG in template or ('"parameters": ' in template and "<|eot_id|>" in template)


class Llama3Parser:
    """Reads and describes these calls."""

    special: Sequence[str] = (TAG,)

    def reader(self, tools: Collection[str], most: int | None, forced: bool) -> Llama3Reader:
        return Llama3Reader(tools, most)

    def frame(self, tools: Sequence[tuple[str, Any]], most: int | None) -> Any:
        """Describe one call: the templates of this family write no answer with several."""
        return {"any_of": [call_frame(name, schema, "parameters") for name, schema in tools]}


class Llama3Reader(CallReader):
    """A call needs no mark if the answer begins with it."""

    opener = TAG
    any_order = False  # an answer may be other JSON

    def __init__(self, tools: Collection[str], most: int | None):
        super().__init__(tools, most)
        self._state = self._start

    def _start(self) -> bool:
        text = self._buffer.lstrip()
        if not text:
            return False
        if not text.startswith("{"):
            self._state = self._text
            return True
        self._given, self._buffer = self._buffer[: len(self._buffer) - len(text)], text
        self._scan, self._state = JsonScan(), self._head
        return True

    def _after(self) -> bool:
        """Read another call after `;`, or only white space. Other text is content."""
        text = self._buffer.lstrip()
        if not text:
            return False
        self._buffer = text
        if text[0] in ";,":
            self._given, self._buffer = text[0], text[1:]
            self._state = self._between
        elif text[0] == "{":
            self._state = self._between
        else:
            self._state = self._text
        return True


@hookimpl
def minisgl_configs() -> Any:
    yield "tool_parser", "llama3", Llama3
