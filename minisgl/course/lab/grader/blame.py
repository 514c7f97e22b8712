"""From an exception to a verdict: whose line raised it, and what that means for the lab."""

from __future__ import annotations

import linecache
import traceback

from minisgl.config import ConfigError
from minisgl.course.lab.grader.gate import Broken, Hangs, Student


class ReferenceTaken(ImportError):  # noqa: N818 - a verdict
    """The student's file asked for the lab's reference."""


def blame(student: Student, error: BaseException) -> Broken:
    """What a gate's exception says about the student's file."""
    if isinstance(error, Broken):
        return error
    taken = _chain(error, ReferenceTaken)
    if taken is not None:
        return Broken("reference", "The file is your own work.", str(taken))
    where = _place(student, error)
    if isinstance(error, NotImplementedError) and where:
        return Broken("unfinished", "Every part is written.", f"Still to write: {where}.")
    if isinstance(error, ConfigError):
        return Broken("loads", "minisgl loads the file and finds its plugin.", str(error))
    if isinstance(error, Hangs):
        return Broken("hangs", "It comes back.", f"It was stopped after some seconds{', ' + where if where else ''}.")
    if isinstance(error, MemoryError):
        return Broken("memory", "It takes the memory that it needs.", f"It took all that there is, {where}.")
    said = f"{type(error).__name__}: {error}".strip().splitlines()
    if where:
        return Broken("raises", "It raises nothing.", f"{said[0]}, {where}.")
    return Broken(
        "promise",
        "The engine keeps its promises with it.",
        " ".join(line.strip() for line in said[:3]),
        step=getattr(error, "step", None),
        request=getattr(error, "uid", None),
        page=getattr(error, "page", None),
    )


def _chain(error: BaseException | None, kind: type[BaseException]) -> BaseException | None:
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error


def _place(student: Student, error: BaseException) -> str:
    """The innermost line of the student's that was running, in words; empty where none was."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(str(student.path))]
    if not frames:
        return ""
    last = frames[-1]
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    return f"line {last.lineno} of {student.path.name}, in {last.name}: {line}"
