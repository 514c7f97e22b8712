"""The labs there are, as ``chapters/*/<lab>.toml`` describe them. Knows no lab by name."""

from __future__ import annotations

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
    from minisgl.course.lab.grader.gate import Gate

CAUSES = {
    "loads": "The file can't be loaded, or minisgl finds no plugin in it.",
    "unfinished": "A part is still to write.",
    "reference": "The file takes the lab's own solution. Write it yourself: `hint` gives the next step.",
    "raises": "The code stops with an error of its own.",
    "hangs": "It does not come back: a loop without an end, or a wait for something that never happens.",
    "memory": "It takes more memory than a gate may have.",
    "dies": "The process that ran it ended at once, without an error to read.",
    "promise": "It breaks a promise of the engine.",
    "never-called": "The server ran without ever calling it.",
}
"""What can go wrong in any lab, beside the causes that its own description names."""


@dataclass(frozen=True)
class Part:
    """What one ``# lab:`` region asks for: a name as in the marker, and hints from vague to plain."""

    name: str
    says: str
    hints: tuple[str, ...]


@dataclass(frozen=True)
class Lab:
    """One lab. ``hook`` is the group that the student's plugin is for, or ``observer`` or ``models``; None: any.

    ``plugin`` is the reference, a module that ships; None: the gates' module has ``skeleton() -> dict[str, str]``.
    ``choice`` is the reference's name in its group and ``name`` the student's (``scheduler=mine``); ``blocked`` are
    modules, beside the reference, that would solve the lab.
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
    torch: bool = False  # its unit gates compute with torch
    renames: dict[str, str] = field(default_factory=dict)
    blocked: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    causes: dict[str, str] = field(default_factory=dict)

    @property
    def file(self) -> str:
        """What a student's file (or folder) is called unless they name it otherwise."""
        return f"my_{self.lab}.py" if self.plugin else f"my_{self.lab}"

    @property
    def words(self) -> list[str]:
        """The options that put the student's plugin, once loaded, to work."""
        if self.hook == "models":
            return [f"architecture={self.name}"]
        return [f"{self.hook}={self.name}"] if self.hook in GROUPS else []

    @property
    def forbidden(self) -> tuple[str, ...]:
        """Modules that a student's file may not import."""
        return (*((self.plugin,) if self.plugin else ()), *self.blocked)

    @property
    def module(self) -> ModuleType:
        """What is particular to the lab's grading."""
        return importlib.import_module(f"minisgl.course.lab.gates.{self.lab}")

    @property
    def gates(self) -> Sequence[Gate]:
        """The lab's own gates; the grader tries loading the file before them."""
        gates: Sequence[Gate] = self.module.GATES
        return gates

    def why(self, cause: str) -> str:
        """A cause in words."""
        return self.causes.get(cause) or CAUSES[cause]


def labs() -> list[Lab]:
    """Every lab, in the order of the course."""
    found = []
    for folder in importlib.resources.files("minisgl.chapters").iterdir():
        if folder.is_dir():
            found += [read(file, folder.name) for file in folder.iterdir() if file.name.endswith(".toml")]
    return sorted(found, key=lambda lab: (lab.chapter, lab.order, lab.lab))


def find(name: str) -> Lab:
    """The lab of that name. Raises `ConfigError` with the ones there are."""
    known = {lab.lab: lab for lab in labs()}
    if name not in known:
        raise ConfigError(f"There is no lab {name!r}{near(name, known)} Labs: {', '.join(known)}.")
    return known[name]


def read(file: Traversable, chapter: str) -> Lab:
    """A lab from its description. Raises ValueError where that can't be one."""
    name = file.name.removesuffix(".toml")
    values: dict[str, Any] = tomllib.loads(file.read_text("utf-8"))
    parts = tuple(Part(part["name"], part["says"], tuple(part["hints"])) for part in values.pop("parts", ()))
    blocked = tuple(values.pop("blocked", ()))
    try:
        lab = Lab(name, chapter, parts=parts, blocked=blocked, **values)
    except TypeError as error:
        raise ValueError(f"{file}: {error}") from error
    if set(lab.causes) & set(CAUSES):
        raise ValueError(f"{file}: causes that every lab has need no text: {set(lab.causes) & set(CAUSES)}")
    return lab
