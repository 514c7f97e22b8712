"""`tool_parser=hermes`: calls as JSON inside `<tool_call>` and `</tool_call>`: Hermes, Qwen 2.5, Qwen 3 and others.

Source: https://github.com/NousResearch/Hermes-Function-Calling and the chat templates of these models.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.plugins.tool_parser import ToolParser
from minisgl.plugins.tool_parser.calls import CallReader, call_frame, one_or_more

OPENER, CLOSER = "<tool_call>", "</tool_call>"
JSON_ARGUMENTS = re.compile(r'"arguments\\?"')
"""The key of the arguments. Families with another form inside the same marks, such as GLM, have no such key."""


@dataclass
class Hermes:
    """Calls as JSON inside ``<tool_call>`` and ``</tool_call>``."""

    def build(self) -> ToolParser:
        return HermesParser()


def matches(template: str) -> bool:
    """Return whether a chat template writes calls in this form."""
    return OPENER in template and JSON_ARGUMENTS.search(template) is not None and "<function=" not in template


class HermesParser:
    """Reads and describes these calls."""

    special: Sequence[str] = ()

    def reader(self, tools: Collection[str], most: int | None, forced: bool) -> HermesReader:
        return HermesReader(tools, most)

    def frame(self, tools: Sequence[tuple[str, Any]], most: int | None) -> Any:
        calls = [[f"{OPENER}\n", call_frame(name, schema), f"\n{CLOSER}"] for name, schema in tools]
        return one_or_more(calls, most, "\n")


class HermesReader(CallReader):
    """Each call has an opener and a closer of its own."""

    opener = OPENER

    def _after(self) -> bool:
        self._skip_space()
        if CLOSER.startswith(self._buffer):
            if self._buffer == CLOSER or self._is_final:
                self._buffer, self._state = "", self._text
            return False
        self._buffer = self._buffer.removeprefix(CLOSER)  # a call without a closer counts, too
        self._state = self._text
        return True


@hookimpl
def minisgl_configs() -> Any:
    yield "tool_parser", "hermes", Hermes
