"""`tool_parser=mistral`: calls after `[TOOL_CALLS]`: a list as JSON, or each as a name and its arguments.

The list is the form up to tokenizer version 7: `[TOOL_CALLS][{"name": "f", "arguments": {…}}]`. Later models write
`[TOOL_CALLS]f[ARGS]{…}`, with a mark before each call. Source: https://github.com/mistralai/mistral-common
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.plugins.tool_parser import ToolParser
from minisgl.plugins.tool_parser.calls import CallReader, JsonScan, call_frame, one_or_more

OPENER, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\][A-Za-z0-9]*)?(?:\[ARGS\])?\s*(?=\{)")
"""The beginning of a call that is no JSON: its name, perhaps an id, and a mark before the arguments."""
MAX_NAMED = 160
"""The largest number of characters of this beginning."""


@dataclass
class Mistral:
    """Calls after ``[TOOL_CALLS]``: a list as JSON, or each as a name and its arguments."""

    def build(self, template: str) -> ToolParser:
        return MistralParser(ARGUMENTS in template)


def matches(template: str) -> bool:
    """Return whether a chat template writes calls in this form."""
    return OPENER in template


class MistralParser:
    """Reads and describes these calls. ``is_named``: forced calls are names with arguments, and no list."""

    special: Sequence[str] = (OPENER, ARGUMENTS, "[CALL_ID]")

    def __init__(self, is_named: bool = False):
        self._is_named = is_named

    def reader(self, tools: Collection[str], most: int | None, forced: bool) -> MistralReader:
        return MistralReader(tools, most)

    def frame(self, tools: Sequence[tuple[str, Any]], most: int | None) -> Any:
        opener, mark = {"token": OPENER}, {"token": ARGUMENTS}
        if self._is_named:
            return one_or_more([[opener, name, mark, {"json_schema": schema}] for name, schema in tools], most, "")
        return [opener, "[", one_or_more([call_frame(name, schema) for name, schema in tools], most, ", "), "]"]


class MistralReader(CallReader):
    """A list of calls, or one call after each opener."""

    opener = OPENER

    def __init__(self, tools: Collection[str], most: int | None):
        super().__init__(tools, most)
        self._in_list, self._is_named = False, False

    def new_id(self) -> str:
        """Return nine letters and digits: the templates of this family accept no other ids."""
        return "".join(random.SystemRandom().choices(string.ascii_letters + string.digits, k=9))

    def _text(self) -> bool:
        found = super()._text()
        if found:
            self._state = self._opened
        return found

    def _opened(self) -> bool:
        """Read `[`, or a name."""
        self._skip_space()
        if self._buffer.startswith(("[", "{")):
            self._in_list = self._buffer[0] == "["
            if self._in_list:
                self._given, self._buffer = self._given + "[", self._buffer[1:]
            self._state = self._between
            return True
        named = NAMED.match(self._buffer)
        if named is not None and named[1] in self._tools:
            self._begin(named[1])
            self._buffer = self._buffer[named.end() :]
            self._scan, self._state, self._is_named = JsonScan(), self._arguments, True
            return True
        return (named is not None or len(self._buffer) > MAX_NAMED) and self._no_call()

    def _after_arguments(self) -> None:
        super()._after_arguments()
        if self._is_named:
            self._state, self._is_named = self._text, False

    def _after(self) -> bool:
        """Read `,` before the next call of a list, or `]`."""
        text = self._buffer.lstrip()
        if not text:
            return False
        if self._in_list and text[0] == ",":
            self._given, self._buffer = ",", text[1:]
            self._state = self._between
            return True
        self._buffer = text[1:] if self._in_list and text[0] == "]" else text
        self._state = self._text
        return True


@hookimpl
def minisgl_configs() -> Any:
    yield "tool_parser", "mistral", Mistral
