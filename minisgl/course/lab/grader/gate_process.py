"""Where a student's code runs: each gate in a process of its own, which a watchdog ends when its time is up.

``python -m minisgl.course.lab.grader.gate_process`` imports what gates need once. Then it
forks for each request that it reads (a JSON line) and answers with JSON lines.
Whatever a gate leaves behind is killed before the answer. It ends with its input.
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

from minisgl.config import GROUPS
from minisgl.course.lab.catalog import Lab, find
from minisgl.course.lab.grader.blame import ReferenceTaken, blame
from minisgl.course.lab.grader.gate import Broken, Gate, Missing, Student
from minisgl.course.lab.verdicts import Verdict

MEMORY = 6 * 2**30
"""Bytes of memory that a gate may take."""
SUBREAPER = 36
"""Linux' prctl for: whoever loses its parent below me becomes my child."""


class Guard(importlib.abc.MetaPathFinder):
    """Refuses the reference to the student's file, and to whatever that calls."""

    def __init__(self, path: Path, forbidden: tuple[str, ...]):
        self.path, self.forbidden = str(path), forbidden
        for name in forbidden:
            sys.modules.pop(name, None)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name not in self.forbidden:
            return
        frame = sys._getframe()
        while frame is not None:
            if frame.f_code.co_filename.startswith(self.path):
                raise ReferenceTaken(f"Line {frame.f_lineno} of {Path(self.path).name} takes {name}.")
            frame = frame.f_back  # type: ignore[assignment]


def load(student: Student) -> None:
    """The first gate of every lab: the file loads, and holds a plugin for the lab's hook."""
    plugin, lab = student.plugin, student.lab
    assert plugin is not None
    promise = "minisgl finds the plugin in the file."
    if lab.hook in GROUPS:
        if f"minisgl_{lab.hook}" not in plugin.hooks:
            raise Broken("loads", promise, f"There is no @hookimpl minisgl_{lab.hook} in it: nothing would build it.")
        names = [name for group, name, _ in plugin.options if group == lab.hook]
        if lab.name not in names:
            seen = f"minisgl_configs yields {names or 'no choice'} for the group {lab.hook!r}, and not {lab.name!r}."
            raise Broken("loads", promise, seen)
    elif lab.hook == "models":
        names = list(student.plugin_manager.models()) if "minisgl_models" in plugin.hooks else []
        if lab.name not in names:
            seen = f"minisgl_models returns {names or 'no class'}, and not {lab.name!r}."
            raise Broken("loads", promise, seen if names else "There is no @hookimpl minisgl_models in it.")


LOADS = Gate("loads", "the file loads, and minisgl finds the plugin in it", load)


def try_gate(lab: Lab, gate: Gate, asked: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> Verdict:
    """Run one gate in this process."""
    verdict = Verdict(gate.name, gate.says, gate.part)
    student = Student(
        lab,
        Path(asked["path"]),
        seed=asked["seed"],
        gate=gate.name,
        replay=asked.get("replay"),
        deadline=time.monotonic() + asked["limit"],
        doing=lambda workload, show: tell({"doing": workload, "show": show}),
    )
    if lab.forbidden:
        sys.meta_path.insert(0, Guard(student.path, lab.forbidden))
    try:
        if lab.plugin:
            student.load()
        verdict.note = gate.run(student) or ""
    except Missing as error:
        verdict.tried, verdict.note = False, str(error)
    except BaseException as error:  # sys.exit() in a student's file ends nothing but its own gate
        verdict.blame(blame(student, error))
    return verdict


def _grandchild(asked: dict[str, Any], answers: IO[str]) -> None:
    """One gate, from the fork to the end of the process."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    if not asked.get("loud"):
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)

    def tell(news: dict[str, Any]) -> None:
        answers.write(json.dumps(news) + "\n")
        answers.flush()

    lab = find(asked["lab"])
    gate = next(gate for gate in (LOADS, *lab.gates) if gate.name == asked["gate"])
    tell({"verdict": try_gate(lab, gate, asked, tell).encode()})


def _serve(asked: dict[str, Any], answers: IO[str]) -> None:
    """Fork for one gate and watch over it."""
    until = time.monotonic() + float(asked["limit"])
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _grandchild(asked, answers)
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
        if select.select([0], [], [], 0.005)[0] and not os.read(0, 1):  # the grader is gone
            _kill_all()
            os._exit(1)
    with contextlib.suppress(ChildProcessError):  # until nobody is left
        while True:
            _kill_all()
            os.waitpid(-1, 0)
    answers.write(json.dumps({"late": late, "status": os.waitstatus_to_exitcode(ended[1])}) + "\n")
    answers.flush()


def _kill_all() -> None:
    """Kill everything below this process."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def main(names: list[str]) -> None:
    """Answer requests until the input ends; ``names`` are modules to import first."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a student prints is not an answer
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    for name in names:
        importlib.import_module(name)
    gc.freeze()
    while line := _read_line():
        _serve(json.loads(line), answers)


def _read_line() -> bytes:
    """A line of standard input, unbuffered: what comes after it stays where `select` sees it."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return b""
        line += byte
    return line


if __name__ == "__main__":
    main(sys.argv[1:])
