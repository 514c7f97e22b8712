"""`tool_parser=auto`: the parser for the form in which the model's chat template writes tool calls."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.plugins.tool_parser import ToolParser

FAMILIES = ("harmony", "hermes", "qwen3_coder", "mistral", "llama3")
"""The modules of the parsers, each with a function that says whether a template writes its form. The first is taken."""


@dataclass
class Auto:
    """The parser for the form in which the chat template writes tool calls, or none if no parser here knows it."""

    def build(self, template: str, build_other: Callable[[str], ToolParser]) -> ToolParser | None:
        modules = ((name, importlib.import_module(f"{__package__}.{name}")) for name in FAMILIES)
        name = next((name for name, module in modules if module.matches(template)), None)
        return None if name is None else build_other(name)


@hookimpl
def minisgl_configs() -> Any:
    yield "tool_parser", "auto", Auto
