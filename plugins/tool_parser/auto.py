"""`tool_parser=auto`: the parser for the form in which the model's chat template writes tool calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.plugins.tool_parser import hermes, llama3, mistral
from minisgl.server.answer import ToolParser

FAMILIES = {"hermes": hermes.matches, "mistral": mistral.matches, "llama3": llama3.matches}
"""Parser → whether a template writes its form. The first that does is taken."""


@dataclass
class Auto:
    """The parser for the form in which the chat template writes tool calls, or none if no parser here knows it."""

    def build(self, template: str, build_other: Callable[[str], ToolParser]) -> ToolParser | None:
        name = next((name for name, matches in FAMILIES.items() if matches(template)), None)
        return None if name is None else build_other(name)


@hookimpl
def minisgl_configs() -> Any:
    yield "tool_parser", "auto", Auto
