"""`reasoning_parser=none`: what a model thinks is content."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minisgl.hooks import hookimpl


@dataclass
class NoParser:
    """No reasoning."""

    def build(self) -> None:
        return None


@hookimpl
def minisgl_configs() -> Any:
    yield "reasoning_parser", "none", NoParser
