"""The process in which a student's code runs: one child process for each gate, killed by a watchdog after its limit.

``python -m minisgl.chapters.lab.grader.gate_process MODULE…`` imports the modules that gates need once, and a lab's
gates before their first run. For each request that it reads from standard input (a JSON line), it forks a child that
runs one gate, and writes JSON lines to standard output. It kills every process that the gate left behind before it
reports the gate's end. It exits when its standard input is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.abc
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import psutil

from minisgl.chapters.lab.catalog import Lab, find
from minisgl.chapters.lab.grader.diagnosis import ReferenceImported, diagnose
from minisgl.chapters.lab.grader.gate import SHRINK_SECONDS, Broken, Gate, Missing, Student
from minisgl.chapters.lab.verdicts import Verdict
from minisgl.config import GROUPS

MEMORY = 6 * 2**30
"""Bytes of memory that a gate may allocate."""
SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of Linux' prctl: orphaned descendants become children of this process."""


class ImportGuard(importlib.abc.MetaPathFinder):
    """An import hook that refuses the reference's modules to the student's file and to functions called from it."""

    def __init__(self, path: Path, forbidden: tuple[str, ...]):
        self.path, self.forbidden = str(path), forbidden
        for name in forbidden:
            sys.modules.pop(name, None)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Raise `ReferenceImported` if a forbidden module is imported below a frame of the student's file."""
        if name not in self.forbidden:
            return
        frame = sys._getframe()
        while frame is not None:
            if frame.f_code.co_filename.startswith(self.path):
                raise ReferenceImported(f"Line {frame.f_lineno} of {Path(self.path).name} imports {name}.")
            frame = frame.f_back  # type: ignore[assignment]


def load(student: Student) -> None:
    """Check that the file contains a plugin for the lab's hook: the first gate of every lab."""
    plugin, lab = student.plugin, student.lab
    assert plugin is not None
    promise = "The file contains the lab's plugin."
    if lab.hook in GROUPS:
        if "minisgl_configs" not in plugin.hooks:
            seen = "The file has no @hookimpl minisgl_configs, so minisgl can't find the plugin."
            raise Broken("loads", promise, seen)
        names = [name for group, name, _ in plugin.options if group == lab.hook]
        if lab.name not in names:
            seen = f"minisgl_configs yields {names or 'no name'} for the group {lab.hook!r}, not {lab.name!r}."
            raise Broken("loads", promise, seen)
    elif lab.hook == "models":
        names = list(student.plugin_manager.models()) if "minisgl_models" in plugin.hooks else []
        if lab.name not in names:
            seen = f"minisgl_models returns {names}, not {lab.name!r}."
            raise Broken("loads", promise, seen if names else "The file has no @hookimpl minisgl_models with a class.")


LOADS = Gate("loads", "the file loads, and minisgl finds the plugin in it", load)


def run_gate(lab: Lab, gate: Gate, request: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> Verdict:
    """Run one gate in this process and return its verdict. ``send`` reports each workload before it runs."""
    student = Student(
        lab,
        Path(request["path"]),
        seed=request["seed"],
        gate=gate.name,
        replay=request.get("replay"),
        patience=request.get("patience", 1.0),
        shrink_seconds=request.get("shrink_seconds", SHRINK_SECONDS),
        search_share=request.get("search_share", 1.0),
        deadline=time.monotonic() + request["limit"],
        on_workload=lambda workload, show: send({"workload": workload, "show": show}),
    )
    if lab.forbidden:
        sys.meta_path.insert(0, ImportGuard(student.path, lab.forbidden))
    return judge(student, gate)


def judge(student: Student, gate: Gate, passed_on: tuple[type[BaseException], ...] = ()) -> Verdict:
    """Run one gate on a student's file and return its verdict. Exceptions of the types ``passed_on`` are raised."""
    verdict = Verdict(gate.name, gate.says, gate.part)
    try:
        if student.lab.plugin:
            student.load()
        verdict.note = gate.run(student) or ""
    except Missing as error:
        verdict.tried, verdict.note = False, str(error)
    except passed_on:
        raise
    except BaseException as error:  # includes SystemExit: sys.exit() in a student's file fails this gate only
        verdict.fail(diagnose(student, error))
    return verdict


def _run_child(request: dict[str, Any], answers: IO[str]) -> None:
    """Run one gate in the forked child and write its verdict."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    if not request.get("loud"):
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)

    def send(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    lab = find(request["lab"])
    extra = [lab.stretch.gate] if lab.stretch else []
    gate = next(gate for gate in (LOADS, *lab.gates, *extra) if gate.name == request["gate"])
    send({"verdict": run_gate(lab, gate, request, send).encode()})


def _serve(request: dict[str, Any], answers: IO[str]) -> None:
    """Fork a child for one gate, kill it after its limit, and report its end."""
    _import_gates(request["lab"])
    until = time.monotonic() + float(request["limit"])
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _run_child(request, answers)
            status = 0
        except BaseException:
            import traceback

            answers.write(json.dumps({"crash": traceback.format_exc()}) + "\n")
        finally:
            with contextlib.suppress(BaseException):
                answers.flush()
            os._exit(status)
    late = False
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() >= until:
            late = True
            _kill_all()
        if select.select([0], [], [], 0.005)[0] and not os.read(0, 1):  # the grader has exited
            _kill_all()
            os._exit(1)
    with contextlib.suppress(ChildProcessError):  # raised when no child is left
        while True:
            _kill_all()
            os.waitpid(-1, 0)
    answers.write(json.dumps({"late": late, "status": os.waitstatus_to_exitcode(ended[1])}) + "\n")
    answers.flush()


def _import_gates(name: str) -> None:
    """Import the gates of a lab in this process, so that no child has to. A child reports what is wrong with them."""
    with contextlib.suppress(Exception):
        _ = find(name).gates
    gc.freeze()


def _kill_all() -> None:
    """Kill every descendant of this process."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def main(names: list[str]) -> None:
    """Answer requests until standard input is closed. ``names`` are the modules to import first."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a student's print() goes to standard error, not between the answers
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    for name in names:
        importlib.import_module(name)
    gc.freeze()
    while line := _read_line():
        _serve(json.loads(line), answers)


def _read_line() -> bytes:
    """Return a line of standard input, read without a buffer, so that `select` sees later input."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return b""
        line += byte
    return line


if __name__ == "__main__":
    main(sys.argv[1:])
