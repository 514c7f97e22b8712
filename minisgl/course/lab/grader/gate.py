"""What a gate is, what it is given of the student, and how it says that a promise was broken.

For authors of labs. Knows no lab, and not in which process a gate runs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minisgl.course.lab.catalog import Lab
from minisgl.plugin_manager.manager import Plugin, PluginManager

__all__ = ["Broken", "Gate", "Hangs", "Invalid", "Missing", "Student"]

UNIT_SECONDS = 10.0
"""How long a gate may take before its process is killed, on a machine with a core to spare."""


class Broken(Exception):  # noqa: N818 - a verdict
    """A promise was broken. ``cause`` is one of the lab's causes (or of `catalog.CAUSES`), ``promise`` what should
    hold, in one line, ``seen`` what happened instead. The rest says where, as far as it is known; ``workload`` is
    what shows it (JSON), and ``show`` that in a few lines for a person."""

    def __init__(
        self,
        cause: str,
        promise: str,
        seen: str,
        *,
        step: int | None = None,
        request: int | None = None,
        page: int | None = None,
        workload: Any = None,
        show: str = "",
    ):
        super().__init__(f"{cause}: {promise} {seen}")
        self.cause, self.promise, self.seen = cause, promise, seen
        self.step, self.request, self.page = step, request, page
        self.workload, self.show = workload, show


class Invalid(Exception):  # noqa: N818
    """A workload makes no sense (a shrunk one may not): try another."""


class Missing(Exception):  # noqa: N818 - nothing is wrong with the student's file
    """A gate needs a package that is not installed, and can't be tried. Says how to install it."""


class Hangs(BaseException):
    """A try took too long. Raised inside the code that runs; a student's ``except Exception`` does not catch it."""


@dataclass
class Student:
    """A student's file, loaded, as a gate sees it. ``seed`` is fresh in each run and printed."""

    lab: Lab
    path: Path
    seed: int = 0
    gate: str = ""
    replay: Any = None
    """The workload to try instead of searching for one."""
    deadline: float = field(default_factory=lambda: time.monotonic() + UNIT_SECONDS)
    doing: Callable[[Any, str], None] = lambda workload, show: None
    """Told each workload before it is tried, and how it is shown, so that a killed gate can name it."""

    def __post_init__(self) -> None:
        self.plugin_manager = PluginManager()
        """Has the student's plugin and no other."""
        self.plugin: Plugin | None = None

    def load(self) -> None:
        """Load the file. Raises `ConfigError`."""
        self.plugin = self.plugin_manager.add(str(self.path))

    def config(self, **options: Any) -> Any:
        """The student's config object for the lab's group, with these options. Raises `ConfigError`."""
        assert self.lab.hook is not None
        return self.plugin_manager.schema(self.lab.hook, self.lab.name)(**options)

    def make(self, config: Any = None, **kwargs: Any) -> Any:
        """What the student's factory makes of ``config`` (None: the default options); ``kwargs`` are what the hook is
        given beside it, as ``page_size=4``. Raises `ConfigError` where it makes nothing."""
        assert self.lab.hook is not None
        return self.plugin_manager.build(self.lab.hook, self.config() if config is None else config, **kwargs)

    @property
    def random(self) -> random.Random:
        """A new generator: the same in each run with this seed, another in each gate."""
        return random.Random(f"{self.seed} {self.gate}")

    @property
    def left(self) -> float:
        """Seconds before the watchdog ends the gate."""
        return self.deadline - time.monotonic()


@dataclass(frozen=True)
class Gate:
    """One thing that a lab checks. ``run`` returns, perhaps what it counted in a few words, or raises `Broken` (or
    anything else: that is red too).

    ``part`` is the part that this gate grades by itself: red before it is written, green after. ``served`` gates run
    in the grader's own process, beside the server that it has started: they get no loaded plugin.
    """

    name: str
    says: str
    run: Callable[[Any], str | None]
    part: str | None = None
    limit: float = UNIT_SECONDS
    served: bool = False
