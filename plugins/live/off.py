"""`live=off`: no live view. ``GET /`` answers 404, and nothing is observed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minisgl.hooks import hookimpl


@dataclass
class Off:
    """No live view."""

    def build(self) -> None:
        return None


@hookimpl
def minisgl_configs() -> Any:
    yield "live", "off", Off
