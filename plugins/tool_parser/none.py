"""`tool_parser=none`: tools are refused, and all text of an answer is content."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minisgl.hooks import hookimpl


@dataclass
class NoParser:
    """No tools."""

    def build(self) -> None:
        return None


@hookimpl
def minisgl_configs() -> Any:
    yield "tool_parser", "none", NoParser
