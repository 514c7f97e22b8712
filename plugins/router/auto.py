"""`router=auto`: smg where it is installed, else `router=exact`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from minisgl.cluster.router import Router


@dataclass
class Auto:
    """``smg`` if it is installed (``minisgl[cluster]``), else ``exact``."""

    def build(self, build_other: Callable[[str], Router]) -> Router:
        return build_other("exact" if importlib.util.find_spec("smg") is None else "smg")


@hookimpl
def minisgl_configs() -> Any:
    yield "router", "auto", Auto
