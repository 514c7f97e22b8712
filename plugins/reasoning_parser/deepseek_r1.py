"""`reasoning_parser=deepseek_r1`: as `think`, but an answer begins within the reasoning whatever the prompt says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.plugins.reasoning_parser import ReasoningParser
from minisgl.plugins.reasoning_parser.think import ThinkParser


@dataclass
class DeepSeekR1:
    """Reasoning up to ``</think>``, with ``<think>`` before it or without."""

    def build(self) -> ReasoningParser:
        return ThinkParser(opened=True)


@hookimpl
def minisgl_configs() -> Any:
    yield "reasoning_parser", "deepseek_r1", DeepSeekR1
