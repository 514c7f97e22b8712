"""The types that authors of labs use: a gate, the student's file as a gate receives it, and a gate's exceptions.

Knows no lab, and does not know in which process a gate runs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from minisgl.chapters.lab.catalog import Lab
from minisgl.plugin_manager.manager import Plugin, PluginManager

__all__ = ["Broken", "Gate", "Invalid", "Missing", "Stretch", "Student", "StudentError", "TimedOut", "amount", "apart"]

UNIT_SECONDS = 10.0
"""Seconds that a gate may run before its process is killed, on a machine with an idle core."""
SHRINK_SECONDS = 2.0
"""Seconds that a search spends on shrinking a failing workload."""


class Broken(Exception):  # noqa: N818 - a verdict
    """A gate found that a promise is broken.

    ``cause`` is one of the lab's causes, or of `catalog.CAUSES`. ``promise`` says in one line what should hold, and
    ``seen`` what happened instead. ``step``, ``request`` and ``page`` say where, as far as it is known. ``workload``
    (JSON) reproduces the failure, and ``show`` describes it in a few lines.
    """

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


class StudentError(Exception):
    """The student's code raised an exception in another process, as under ``lab grade``.

    Its instances are also instances of the built-in type that the code raised, if gates handle that type. ``broken`` is
    the finding.
    """

    def __init__(self, message: str, broken: Broken):
        super().__init__(message)
        self.broken = broken


class Invalid(Exception):  # noqa: N818
    """A workload is meaningless, for example after shrinking. The search skips it."""


def amount(number: int, noun: str) -> str:
    """Return a number and its noun, with the plural's s if the number is not 1."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def apart(a: float, b: float) -> tuple[str, str]:
    """Return two different numbers as texts that differ: with two decimals if that is enough, otherwise with more."""
    for digits in (2, 3, 6, 9):
        first, second = f"{a:.{digits}f}", f"{b:.{digits}f}"
        if first != second:
            return first, second
    return repr(a), repr(b)


class Missing(Exception):  # noqa: N818 - not an error of the student's file
    """A gate can't run because a package is not installed. The message says how to install the package."""


class TimedOut(BaseException):
    """A workload took too long. Raised inside the student's running code, whose ``except Exception`` misses it."""


@dataclass
class Student:
    """A student's file as a gate receives it. ``seed`` differs in each run of the grader, which prints the seed."""

    by_messages: ClassVar[bool] = False
    """Whether the student's code runs in another process: each use of one of its objects is then a message."""
    lab: Lab
    path: Path
    seed: int = 0
    gate: str = ""
    replay: Any = None
    """The workload to run instead of searching for one."""
    deadline: float = field(default_factory=lambda: time.monotonic() + UNIT_SECONDS)
    """The time of `time.monotonic` at which the watchdog kills the gate."""
    slower: float = 1.0
    """How many times as long as here a workload takes where the student's code is."""
    patience: float = 1.0
    """How many times its usual limit one workload may take before it counts as hanging."""
    shrink_seconds: float = SHRINK_SECONDS
    """For how long a search shrinks a failing workload."""
    search_share: float = 1.0
    """The share of a search's usual workloads and time. A search makes its first ``at_least`` workloads anyway."""
    on_workload: Callable[[Any, str], None] = lambda workload, show: None
    """Called with each workload, and its description, before it runs: the verdict of a killed gate names it."""

    def __post_init__(self) -> None:
        self.plugin_manager = PluginManager()
        """Contains the student's plugin and no other."""
        self.plugin: Plugin | None = None

    def load(self) -> None:
        """Load the student's file as a plugin. Raise `ConfigError` if that fails."""
        self.plugin = self.plugin_manager.add(str(self.path))

    def config(self, **options: Any) -> Any:
        """Return the student's config object for the lab's group, with these options.

        Raise `ConfigError` if the file has no such config class, and `Broken` if the class lacks one of the options.
        """
        assert self.lab.hook is not None
        schema: Any = self.plugin_manager.schema(self.lab.hook, self.lab.name)
        lacking = sorted(set(options) - {f.name for f in fields(schema)})
        if lacking:
            names = ", ".join(f"`{name}`" for name in lacking)
            seen = f"The config class `{schema.__name__}` has no field {names}."
            raise Broken("lacks-option", "The config class has the options that the gates set.", seen)
        return schema(**options)

    def make(self, config: Any = None, **kwargs: Any) -> Any:
        """Build the student's object with the factory hook of the lab's group.

        ``config`` None: the default options. ``kwargs`` are the hook's other arguments, such as ``page_size=4``. Raise
        `ConfigError` if the factory returns None.
        """
        assert self.lab.hook is not None
        return self.plugin_manager.build(self.lab.hook, self.config() if config is None else config, **kwargs)

    def options(self) -> set[str]:
        """Return the names of the plugin's options."""
        assert self.lab.hook is not None
        schema: Any = self.plugin_manager.schema(self.lab.hook, self.lab.name)
        return {f.name for f in fields(schema)}

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of `chapters.lab.grader.tutor_runs`, which runs an engine with the student's plugin."""
        return function(*args, **kwargs)

    @property
    def random(self) -> random.Random:
        """A new random generator, whose numbers depend only on the seed and on the gate's name."""
        return random.Random(f"{self.seed} {self.gate}")

    @property
    def seconds_left(self) -> float:
        """Seconds before the watchdog kills the gate."""
        return self.deadline - time.monotonic()


@dataclass(frozen=True)
class Gate:
    """One check of a lab.

    ``run`` raises `Broken`, or another exception, if the check fails. It may return a few words about what it counted.
    ``part`` names the part that this gate grades alone: the gate is red before that part is written, and green after.
    A gate with ``served`` runs in the grader's own process against a running server, and gets a `Served` instead of a
    `Student`. ``limit`` is in seconds. ``points`` is what `lab grade` gives for it. A gate with ``transcript`` compares
    only data, and `lab grade` runs it in the grader's process, even if the lab's other gates run in the student's.
    ``needs`` names gates whose parts this gate's part calls: while one of these gates is red, this gate does not run,
    because its findings would blame code that may be right.
    """

    name: str
    says: str
    run: Callable[[Any], str | None]
    part: str | None = None
    limit: float = UNIT_SECONDS
    served: bool = False
    points: float = 1.0
    transcript: bool = False
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stretch:
    """A task beyond a lab, with a number to beat. It is measured after all gates are green, and never graded.

    ``says`` is the task in one sentence, with the number. ``measure`` returns what it counted, in a few words, and
    whether the number is beaten.
    """

    says: str
    measure: Callable[[Student], tuple[str, bool]]

    @property
    def gate(self) -> Gate:
        """The measurement as a gate, whose note is the result."""

        def run(student: Student) -> str:
            counted, beaten = self.measure(student)
            return f"{counted}: {'beaten' if beaten else 'not beaten yet'}"

        return Gate("stretch", self.says, run, limit=6 * UNIT_SECONDS)
