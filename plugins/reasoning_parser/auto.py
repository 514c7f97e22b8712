"""`reasoning_parser=auto`: the parser for what the model's chat template writes of reasoning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.plugins.reasoning_parser import ReasoningParser


@dataclass
class Auto:
    """``harmony`` if the chat template has channels, ``think`` if it has ``</think>``, otherwise none.

    A template that only removes what is before ``</think>`` from earlier answers is that of DeepSeek R1.
    """

    def build(self, template: str, build_other: Callable[[str], ReasoningParser]) -> ReasoningParser | None:
        if "<|channel|>" in template and "<|message|>" in template:
            return build_other("harmony")
        if "</think>" not in template:
            return None
        return build_other("think" if "<think>" in template else "deepseek_r1")


@hookimpl
def minisgl_configs() -> Any:
    yield "reasoning_parser", "auto", Auto
