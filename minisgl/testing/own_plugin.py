"""A user's plugin in a file, for tests: a prefix cache with options of many types, and an observer with metrics."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

__all__ = ["MINE", "run_python", "write_plugin"]

MINE = '''
from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import torch

from minisgl import hookimpl


class Colour(Enum):
    RED = 1
    BLUE = 2


@dataclass
class Inner:
    """Nested."""

    depth: int = 3


@dataclass
class Mine:
    """My prefix cache."""

    max_nodes: int = 10_000
    """How many nodes."""
    ratio: float = float("inf")
    colour: Colour = Colour.RED
    where: Path = Path("/tmp")
    name: str | None = None
    sizes: list[int] = field(default_factory=list)
    inner: Inner = field(default_factory=Inner)

    def build(self, page_size):
        return Cache(("mine", page_size, self.max_nodes))


@hookimpl
def minisgl_configs():
    yield "cache", "mine", Mine


class Cache(tuple):
    """A cache that keeps the arguments it was built with."""

    def match(self, key): ...


class Counter:
    """An observer that counts."""

    def __init__(self):
        self.added = 0

    @hookimpl
    def minisgl_request_added(self, req):
        self.added += 1

    @hookimpl
    def minisgl_metrics(self):
        return f"added {self.added}"
'''
"""The text of the plugin: ``cache=mine``, and the observer ``Counter``."""


def write_plugin(folder: Path, body: str, name: str = "my_cache.py") -> Path:
    """Write a plugin file, with the imports that every plugin needs before ``body``. Return its path."""
    path = folder / name
    head = "from dataclasses import dataclass\nfrom minisgl import hookimpl\n"
    path.write_text(head + textwrap.dedent(body))
    return path


def run_python(code: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a new Python process, with ``env`` in its environment. Return what it printed."""
    command = [sys.executable, "-c", textwrap.dedent(code), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | env, check=False)
