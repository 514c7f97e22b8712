"""From an exception to a verdict: which line of the student's file raised it, and which cause of the lab that is."""

from __future__ import annotations

import ast
import linecache
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

from minisgl.chapters.lab.grader.gate import Broken, Student, StudentError, TimedOut
from minisgl.config import ConfigError
from minisgl.plugins.external.failures import PluginError

_UNEXPECTED = (AttributeError, TypeError, KeyError, IndexError, NameError)
"""Errors whose message does not say where they come from."""


class ReferenceImported(ImportError):  # noqa: N818 - a finding
    """The student's file imported the lab's reference, or another blocked module."""


def diagnose(student: Student, error: BaseException) -> Broken:
    """Return the finding that an exception of a gate is for the student: its cause, its promise and its line."""
    if isinstance(error, Broken):
        return error
    if isinstance(error, StudentError):  # another process has diagnosed it
        return error.broken
    if isinstance(error, PluginError) and error.__cause__ is not None:  # diagnose what the code itself raised
        error = error.__cause__
    imported = _chain(error, ReferenceImported)
    if imported is not None:
        return Broken("reference", "The file is your own work.", str(imported))
    where = _place(student, error) or (_called(student, str(error)) if isinstance(error, TypeError) else "")
    if isinstance(error, NotImplementedError) and where:
        return Broken("unfinished", "Every part is written.", f"Still to write: {where}.")
    if isinstance(error, ConfigError):
        return Broken("loads", "minisgl loads the file and finds its plugin.", str(error))
    if isinstance(error, TimedOut):
        said = str(error) or "It was stopped after its time limit"
        seen = f"{said}{', in ' + where if where else ''}."
        return Broken("hangs", "The code returns within its time limit.", seen)
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error):
        seen = f"It asked for more memory than a gate may use{', in ' + where if where else ''}."
        return Broken("memory", "The code stays within the memory limit of a gate.", seen)
    message = f"{type(error).__name__}: {error}".strip().splitlines()
    if where:
        notes = " ".join(getattr(error, "__notes__", ()))  # of the gate: what it called
        return Broken("raises", "The code raises no exception.", f"{message[0]}, in {where}. {notes}".strip())
    last = traceback.extract_tb(error.__traceback__)[-1:]
    at = f"line {last[0].lineno} of {Path(last[0].filename).name}" if last and last[0].lineno else "a call"
    raised = f" (raised in `{last[0].name}`, {at})" if last else ""
    return Broken(
        "promise",
        "The engine keeps its promises with this plugin.",
        " ".join(line.strip() for line in message[:3]) + raised * isinstance(error, _UNEXPECTED),
        step=getattr(error, "step", None),
        request=getattr(error, "uid", None),
        page=getattr(error, "page", None),
    )


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and the chain of its causes, each once: a chain may be a circle."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _chain(error: BaseException, kind: type[BaseException]) -> BaseException | None:
    """Return the first exception of type ``kind`` in the chain of causes of ``error``, or None."""
    return next((each for each in causes_of(error) if isinstance(each, kind)), None)


def _place(student: Student, error: BaseException) -> str:
    """Describe the innermost line of the student's file in the traceback, or return an empty string without one."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(str(student.path))]
    if not frames:
        return ""
    last = next((frame for frame in reversed(frames) if frame.lineno), frames[-1])
    if not last.lineno:  # such as generated code
        return f"{student.path.name}, in {last.name}"
    line = linecache.getline(last.filename, last.lineno).strip()
    return f"line {last.lineno} of {student.path.name}, in {last.name}" + (f": {line}" if line else "")


def _called(student: Student, message: str) -> str:
    """Describe the student's function that was called with wrong arguments, or return an empty string for another.

    Python raises this TypeError in the caller, so no line of the function is in the traceback.
    """
    called = re.match(r"([\w.]+)\(\) (?:missing|takes|got) ", message)
    if called is None or not student.path.is_file():
        return ""
    *owners, name = called[1].split(".")
    tree: ast.AST = ast.parse(student.path.read_text())
    for owner in owners:
        tree = next((n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == owner), ast.Pass())
    found = next((n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name), None)
    if found is None:
        return ""
    line = linecache.getline(str(student.path), found.lineno).strip()
    return f"line {found.lineno} of {student.path.name}, which was called: {line}"
