"""Grades one submission: ``python -m minisgl.chapters.lab.grading.runner``, started by ``lab grade`` for each file.

The process reads a JSON request from its standard input. It moves into a network of its own, starts the student's
processes there, runs the gates, and writes JSON lines to its standard output: the isolation, each verdict, the end.
Nothing else writes to this pipe: the student's processes have other files, and this process never imports the student's
file.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from minisgl.chapters.lab.catalog import CAUSES, Lab, find
from minisgl.chapters.lab.grader.gate import Broken, Gate
from minisgl.chapters.lab.grader.gate_process import LOADS, judge
from minisgl.chapters.lab.grader.grade import WATCHDOG_SECONDS, grade
from minisgl.chapters.lab.grading.clean_tree import CleanTree
from minisgl.chapters.lab.grading.isolation import isolate, own_mounts, own_network
from minisgl.chapters.lab.grading.private import private_gates
from minisgl.chapters.lab.grading.remote import SLOWER, RemoteStudent
from minisgl.chapters.lab.grading.sandbox import Sandbox, SandboxFailed
from minisgl.chapters.lab.grading.usage import UsageLimit
from minisgl.chapters.lab.grading.wire import Lost, Malformed
from minisgl.chapters.lab.signals import signals_raise
from minisgl.chapters.lab.verdicts import Verdict
from minisgl.testing.serving import Server, scaled_timeout

__all__ = ["Gates", "judged_by", "main"]

MOST_CHARACTERS = 4000
"""The longest text of a verdict that a student's process may send."""


def judged_by(lab: Lab, gate: Gate) -> str:
    """Return which process judges a gate: ``grader``, ``student`` or ``server`` (the grader, over HTTP)."""
    if gate.served:
        return "server"
    return "grader" if lab.data or gate.transcript else "student"


class Gates:
    """Runs gates that use no server. It takes the place of `minisgl.chapters.lab.grader.grade.ForkServer`."""

    def __init__(self, sandbox: Sandbox, private: Path | None):
        self.sandbox, self.private = sandbox, private

    def run(self, lab: Lab, path: Path, gate: Gate, seed: int, replay: Any = None) -> Verdict:
        """Run one gate on the file at ``path`` and return its verdict."""
        started = time.monotonic()
        run = self._in_grader if judged_by(lab, gate) == "grader" else self._in_student
        verdict = run(lab, path, gate, seed)
        verdict.seconds = time.monotonic() - started
        return verdict

    def _in_grader(self, lab: Lab, path: Path, gate: Gate, seed: int) -> Verdict:
        """Run the gate in this process, with stand-ins for the student's objects."""
        deadline = time.monotonic() + scaled_timeout(SLOWER * gate.limit)
        student = RemoteStudent(lab, path, seed=seed, gate=gate.name, deadline=deadline, sessions=self.sandbox)
        try:
            return judge(student, gate, passed_on=(SandboxFailed, KeyboardInterrupt))
        finally:
            student.close()

    def _in_student(self, lab: Lab, path: Path, gate: Gate, seed: int) -> Verdict:
        """Run the gate in the student's process, and check the verdict that it sends."""
        limit = scaled_timeout(SLOWER * gate.limit)  # a busy machine must not refuse a right solution
        request: dict[str, Any] = {"lab": lab.lab, "path": str(path), "gate": gate.name, "seed": seed, "limit": limit}
        request["patience"] = SLOWER
        request["gates"] = str(self.private) if self.private else None
        verdict, workload = Verdict(gate.name, gate.says, gate.part), None
        channel = self.sandbox.start(request)
        until = time.monotonic() + limit + WATCHDOG_SECONDS
        try:
            while True:
                message = json.loads(channel.receive(until))
                if "verdict" in message:
                    return checked(lab, verdict, message["verdict"])
                workload = message["workload"], str(message["show"])[:MOST_CHARACTERS]
        except Lost:
            seen = f"The process ended with status {self.sandbox.end()}, without a verdict."
            broken = Broken("dies", "The process that runs the code does not end.", seen)
        except TimeoutError:
            seen = f"The code did not return within {limit:.0f} s, and its process was killed."
            broken = Broken("hangs", "The code returns within its time limit.", seen)
        except (Malformed, ValueError, TypeError, KeyError) as error:
            broken = _unreadable(f"{type(error).__name__}: {error}")
        finally:
            channel.close()
            self.sandbox.end()
        if workload is not None:
            broken.workload, broken.show = workload
        return verdict.fail(broken)


def _unreadable(why: str) -> Broken:
    return Broken(
        "transcript", "The code's process sends a verdict of the gate.", f"It sent something else: {why:.200}"
    )


def checked(lab: Lab, verdict: Verdict, data: Any) -> Verdict:
    """Return ``verdict`` with the fields that a student's process sent, if they are a verdict; else a red one."""
    kinds = {"tried": bool, "note": str, "cause": str, "promise": str, "seen": str, "show": str}
    if not isinstance(data, dict) or data.get("gate") != verdict.gate:
        return verdict.fail(_unreadable("not a verdict of this gate"))
    for name, kind in kinds.items():
        value = data.get(name)
        if not isinstance(value, kind):
            return verdict.fail(_unreadable(f"{name} is {value!r:.40}"))
        setattr(verdict, name, value[:MOST_CHARACTERS] if isinstance(value, str) else value)
    for name in ("step", "request", "page"):
        value = data.get(name)
        setattr(verdict, name, value if isinstance(value, int) and not isinstance(value, bool) else None)
    if verdict.cause and verdict.cause not in lab.causes and verdict.cause not in CAUSES:
        verdict.cause = "transcript"
    verdict.workload = data.get("workload") if len(json.dumps(data.get("workload"))) < 10**6 else None
    return verdict


def modules_of(lab: Lab) -> list[str]:
    """Return the modules that the student's process imports before the student's file."""
    common = ["numpy", "minisgl.scheduler", "minisgl.plugins.cache.base"]
    if lab.data:
        return common
    return [*common, "minisgl.testing.drive", *(["torch", "minisgl.llm"] if lab.torch else [])]


def run(request: dict[str, Any], tell: Any) -> None:
    """Grade the submission of the request. ``tell`` gets the lines of the answer."""
    lab, source = find(request["lab"]), Path(request["path"])
    offline = own_network()
    tree = CleanTree(lab, Path(request["tree"]))
    isolation = isolate(request["user"], tree.expose, tree.hide, tree.python)
    isolation.network = offline is None
    isolation.own_mounts = (unmounted := own_mounts()) is None
    if unmounted is not None:
        isolation.notes.append(f"the disk space of a submission is limited by measuring it: {unmounted}")
    if offline is not None:
        isolation.notes.append(f"no network namespace: {offline}")
    tell({"isolation": isolation.encode()})
    private = Path(request["gates"]) if request["gates"] else None
    extra = private_gates(private).get(lab.lab, []) if private else []
    known = {gate.name for gate in (LOADS, *lab.gates, *extra)}
    given = [source, *([private] if extra and private and not lab.data else [])]
    with (
        isolation.box(tree.expose, tree.hide, given) as (words, work, (path, *others)),
        UsageLimit(work.parent) as limit,
    ):
        sandbox = Sandbox(words, tree.python, modules_of(lab), work.parent / "student.log")
        if not lab.plugin:
            path = isolation.writable(path, work)
        student = RemoteStudent(lab, path, deadline=time.monotonic() + 3600.0, sessions=sandbox)

        def tell_verdict(verdict: Verdict) -> None:
            if limit.broken is not None and verdict.tried:
                verdict.fail(limit.broken)
            tell({"verdict": dataclasses.asdict(verdict)})

        def prepare_served(served: Any) -> None:
            served.start = functools.partial(Server, python=[*words, str(tree.python)])
            served.run_there = student.run

        try:
            grade(
                lab,
                path,
                seed=request["seed"],
                only=[name for name in request["only"] if name in known],
                serve=request["serve"],
                fork_server=Gates(sandbox, others[0] if others else None),  # type: ignore[arg-type]
                extra=extra,
                prepare_served=prepare_served,
                on_verdict=tell_verdict,
            )
        finally:
            student.close()
            sandbox.close()
    tell({"end": True})


def main() -> None:
    """Answer the request on standard input."""
    os.environ.pop("PYTHONPATH", None)  # only the words of a server's start may set it for the student's processes
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a gate prints goes to standard error

    def tell(line: dict[str, Any]) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    try:
        with signals_raise():
            run(json.loads(sys.stdin.readline()), tell)
    except BaseException as error:
        tell({"failed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()})
        sys.exit(1)


if __name__ == "__main__":
    main()
