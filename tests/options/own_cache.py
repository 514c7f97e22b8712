"""A plugin file with a cache whose options have several types, and the message of arguments that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.config import ConfigError
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager

PLUGIN = """
from dataclasses import dataclass, field
from enum import Enum

from minisgl import hookimpl


class Colour(Enum):
    RED = 1
    BLUE = 2


@dataclass
class Mine:
    path: str
    max_nodes: int = 10_000
    ratio: float | None = None
    colour: Colour = Colour.RED
    sizes: list[int] = field(default_factory=list)

    def __post_init__(self):
        if self.max_nodes % 2:
            raise ValueError(f"cache.max_nodes={self.max_nodes}: it must be even.")

    def build(self):
        return self


@hookimpl
def minisgl_configs():
    yield "cache", "mine", Mine
"""


def write_plugin(folder: Path) -> str:
    """Write the plugin file, and return its path. Skip without the plugin that loads plugin files."""
    pytest.importorskip("minisgl.plugins.external")
    path = folder / "mine.py"
    path.write_text(PLUGIN)
    return str(path)


def refused(manager: PluginManager, *words: str) -> str:
    """Return the message with which these words are refused."""
    with pytest.raises(ConfigError) as caught:
        compose(manager, words)
    return str(caught.value)
