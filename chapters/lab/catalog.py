"""The list of labs, read from the descriptions ``chapters/*/<lab>.toml``. Contains no lab's name."""

from __future__ import annotations

import functools
import importlib
import importlib.resources
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources.abc import Traversable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from minisgl.config import GROUPS, ConfigError
from minisgl.plugin_manager.discovery import near

if TYPE_CHECKING:
    from minisgl.chapters.lab.grader.gate import Gate, Stretch

CAUSES = {
    "loads": "minisgl can't load the file, or finds no plugin for this lab's hook in it.",
    "lacks-option": "The gates set an option that the file's config class does not have. Keep the config class of the "
    "skeleton, with all its fields.",
    "unfinished": "A part of the lab is not written yet.",
    "reference": "The file imports the lab's own solution. Write the code yourself. The command `hint` prints a hint.",
    "raises": "The code stops with an exception of its own.",
    "returns": "The code returned a value of another kind than the promise names.",
    "hangs": "The code did not return within the limit. It has a loop without end, it waits for an event that never "
    "happens, or it computes many times as long as a plain solution.",
    "memory": "The code needs more memory than a gate may use.",
    "disk": "The code writes more than a submission may write. Only `lab grade` reports this.",
    "dies": "The process that ran the code ended suddenly, without an error message.",
    "transcript": "The grader could not read what the process of the code returned. Only `lab grade` reports this.",
    "promise": "The code breaks a promise of the engine. docs/architecture.md lists the promises.",
    "earlier": "The failure needs earlier workloads of the same process: alone, in a new process, the workload is "
    "right. The code keeps something in a module, in a class or in a default argument, or its result is random.",
    "never-called": "The server ran and never called the code.",
}
"""Causes that any lab can report, in addition to the causes in its own description: name → explanation."""


@dataclass(frozen=True)
class Part:
    """One ``# lab:`` region that a student writes: its name in the marker, its task, and hints from vague to plain."""

    name: str
    says: str
    hints: tuple[str, ...]


@dataclass(frozen=True)
class Lab:
    """One lab, as its description file defines it.

    ``hook`` is the group of the student's plugin, or ``observer``, or ``models``; None: any hook. ``plugin`` is the
    module of the reference solution, a shipped plugin; None: the gates' module has ``skeleton() -> dict[str, str]``.
    ``choice`` is the reference's name in its group, and ``name`` the student's (``scheduler=mine``). ``blocked`` lists
    more modules that the student's file may not import, because they solve the lab. ``minutes`` estimates how long a
    student needs. ``data``: what the student's code returns is data, so `lab grade` runs every gate in the grader's own
    process. ``kept`` lists the modules of ``blocked`` that stay in the clean installation of `lab grade`, because the
    lab's gates need them there. ``serve`` lists the options without which a server does not call the plugin.
    """

    lab: str
    chapter: str  # the folder's name
    title: str
    says: str
    hook: str | None = None
    plugin: str | None = None
    choice: str | None = None
    name: str = "mine"
    order: int = 0
    minutes: int = 60
    torch: bool = False  # the unit gates compute with torch
    renames: dict[str, str] = field(default_factory=dict)
    blocked: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    data: bool = False
    serve: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    causes: dict[str, str] = field(default_factory=dict)

    @property
    def file(self) -> str:
        """The default name of the student's file, or of the student's folder for a lab without a reference."""
        return f"my_{self.lab}.py" if self.plugin else f"my_{self.lab}"

    @property
    def words(self) -> list[str]:
        """The options that select the student's plugin, once it is loaded."""
        if self.hook == "models":
            return [f"architecture={self.name}"]
        return [f"{self.hook}={self.name}"] if self.hook in GROUPS else []

    @property
    def command(self) -> str:
        """The command that serves with the student's plugin, in the student's folder."""
        return " ".join(["python -m minisgl", *self.serve, f"plugins={self.file}", *self.words])

    @property
    def forbidden(self) -> tuple[str, ...]:
        """The modules that a student's file may not import."""
        return (*((self.plugin,) if self.plugin else ()), *self.blocked)

    @property
    def module(self) -> ModuleType:
        """The module with the lab's gates."""
        return importlib.import_module(f"minisgl.chapters.lab.gates.{self.lab}")

    @property
    def gates(self) -> Sequence[Gate]:
        """The lab's own gates. The grader runs the gate ``loads`` before them."""
        gates: Sequence[Gate] = self.module.GATES
        return gates

    @property
    def stretch(self) -> Stretch | None:
        """The task beyond the lab, with a number to beat, if the lab has one."""
        stretch: Stretch | None = getattr(self.module, "STRETCH", None)
        return stretch

    @property
    def num_gates(self) -> int:
        """The number of gates that `test` runs, with the gate ``loads``."""
        return len(self.gates) + bool(self.plugin)

    @property
    def gate_names(self) -> list[str]:
        """The names of the gates that `test` runs, in order."""
        return [*(["loads"] if self.plugin else []), *(gate.name for gate in self.sorted_gates)]

    @property
    def sorted_gates(self) -> list[Gate]:
        """The lab's own gates in the order in which they run: those that use the server are last."""
        return sorted(self.gates, key=lambda gate: gate.served)

    def why(self, cause: str) -> str:
        """Return the explanation of a cause."""
        return self.causes.get(cause) or CAUSES[cause]


def labs() -> list[Lab]:
    """Return every lab, in the order of the course."""
    found = []
    for folder in importlib.resources.files("minisgl.chapters").iterdir():
        if folder.is_dir():
            found += [read(file, folder.name) for file in folder.iterdir() if file.name.endswith(".toml")]
    return sorted(found, key=lambda lab: (lab.chapter, lab.order, lab.lab))


@functools.cache
def _by_name() -> dict[str, Lab]:
    return {lab.lab: lab for lab in labs()}


def find(name: str) -> Lab:
    """Return the lab ``name``. Raise `ConfigError`, with the known names, if there is no such lab."""
    known = _by_name()
    if name not in known:
        raise ConfigError(f"There is no lab {name!r}{near(name, known)} Labs: {', '.join(known)}.")
    return known[name]


def read(file: Traversable, chapter: str) -> Lab:
    """Return the lab that a description file defines. Raise ValueError if the description is invalid."""
    name = file.name.removesuffix(".toml")
    values: dict[str, Any] = tomllib.loads(file.read_text("utf-8"))
    parts = tuple(Part(part["name"], part["says"], tuple(part["hints"])) for part in values.pop("parts", ()))
    blocked, kept, serve = (tuple(values.pop(key, ())) for key in ("blocked", "kept", "serve"))
    try:
        lab = Lab(name, chapter, parts=parts, blocked=blocked, kept=kept, serve=serve, **values)
    except TypeError as error:
        raise ValueError(f"{file}: {error}") from error
    if set(lab.causes) & set(CAUSES):
        common = ", ".join(sorted(set(lab.causes) & set(CAUSES)))
        raise ValueError(f"{file}: [causes] describes {common}, which every lab has already. Remove it from the file.")
    return lab
