"""`graph=auto`: CUDA graphs on a GPU, no graphs on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from minisgl.hooks import hookimpl
from minisgl.plugins.graph.replaying import EARLY

if TYPE_CHECKING:
    from minisgl.plugins.graph import GraphRunner


@dataclass
class Auto:
    """The graph runner ``cuda`` on a GPU, and ``none`` on a CPU."""

    early_context: ClassVar[str] = EARLY

    def build(self, device: torch.device, build_other: Callable[[str], GraphRunner]) -> GraphRunner:
        return build_other("cuda" if device.type == "cuda" else "none")


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "graph", "auto", Auto
