"""The results of gates: as data, and as the lines that a student reads."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from minisgl.chapters.lab.catalog import Lab
from minisgl.chapters.lab.grader.gate import Broken

__all__ = ["Report", "Verdict"]

LINES = 16
"""The largest number of lines that explain one failure."""
_WIDTH = 110  # characters of a line


@dataclass
class Verdict:
    """One gate's result.

    ``cause`` is empty for a green gate. ``tried`` is False if the gate did not run: an earlier red gate stopped the
    grading, or a package is missing. ``note`` is what a green gate counted, or why a gate did not run. The other fields
    are those of `minisgl.chapters.lab.grader.gate.Broken`.
    """

    gate: str
    says: str
    part: str | None = None
    tried: bool = True
    seconds: float = 0.0
    note: str = ""
    cause: str = ""
    promise: str = ""
    seen: str = ""
    step: int | None = None
    request: int | None = None
    page: int | None = None
    show: str = ""
    workload: Any = None

    @property
    def green(self) -> bool:
        """Whether the gate ran and found nothing wrong."""
        return self.tried and not self.cause

    def fail(self, broken: Broken) -> Verdict:
        """Copy the fields of ``broken`` into this verdict and return the verdict."""
        self.cause, self.promise, self.seen = broken.cause, broken.promise, broken.seen
        self.step, self.request, self.page = broken.step, broken.request, broken.page
        self.show, self.workload = broken.show, broken.workload
        return self

    def line(self) -> str:
        """Return the gate's result in one line."""
        mark = "ok  " if self.green else "RED " if self.tried else "  - "
        seconds = f"{self.seconds:5.1f} s" if self.tried else "not tried"
        return f"  {mark} {self.gate:<13} {self.note or self.says}  ({seconds.strip()})"

    def says_the_same(self, other: Verdict) -> bool:
        """Return whether a student would read the same about both red gates, apart from the command to repeat it."""
        return (self.cause, self.promise, self.seen, self.show) == (other.cause, other.promise, other.seen, other.show)

    def explain(self, lab: Lab, again: str) -> list[str]:
        """Return at most `LINES` lines that explain a red gate. ``again`` is the command that reproduces it."""
        places = {"step": self.step, "request": self.request, "page": self.page}
        if self.step is not None and self.step < 0:
            places["step"] = None
        where = ", ".join(f"{name} {value}" for name, value in places.items() if value is not None)
        if self.step is not None and self.step < 0:
            where = f"before the first step{', ' + where if where else ''}"
        lines = [
            *_field("Promise", self.promise, 2),
            *_field("Seen", self.seen, 4),
            *(_field("Where", where, 1) if where else ()),
            *_field("Why", lab.why(self.cause), 4),
        ]
        tail = [f"Again:   {again}"] if again else []  # never cut: it is a command to copy
        shown = [part for line in self.show.splitlines() for part in _wrapped(line)]
        room = LINES - len(lines) - len(tail) - 1
        if shown:
            if len(shown) > room:
                shown = [*shown[: room - 1], f"… {len(shown) - room + 1} more lines"]
            lines.append("The smallest workload found that shows the failure:")
            lines += ["  " + line for line in shown]
        return ["    " + line for line in [*lines, *tail]]

    def encode(self) -> dict[str, Any]:
        """Return the verdict as a dictionary that JSON can hold."""
        return asdict(self)


def _wrapped(line: str) -> list[str]:
    """Return a line of a workload in at most three lines, of which the later ones are indented."""
    if len(line) <= _WIDTH:
        return [line]
    return textwrap.wrap(line, _WIDTH, subsequent_indent="    ", max_lines=3, placeholder=" …")


def _field(name: str, text: str, most: int) -> list[str]:
    """Return ``text`` behind its ``name``, wrapped to at most ``most`` lines."""
    width = 9
    lines = textwrap.wrap(
        " ".join(text.split()), _WIDTH - width, max_lines=most, placeholder=" …", break_long_words=False
    )
    return [(f"{name + ':':<{width}}" if i == 0 else " " * width) + line for i, line in enumerate(lines or [""])]


@dataclass
class Report:
    """The result of grading one file: the file's path and hash, the seed, and each gate's verdict."""

    lab: Lab
    path: str
    sha256: str
    seed: int
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every gate ran and is green. A report without gates has not passed."""
        return bool(self.verdicts) and all(verdict.green for verdict in self.verdicts)

    @property
    def red(self) -> Iterator[Verdict]:
        """The verdicts of the gates that ran and failed."""
        return (verdict for verdict in self.verdicts if verdict.tried and not verdict.green)
