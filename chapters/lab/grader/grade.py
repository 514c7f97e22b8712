"""Grades one file: each gate in a child process under a watchdog, then the gates that use the real server.

Knows gates and verdicts. The student's code never runs in this process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from minisgl.chapters.lab.catalog import Lab
from minisgl.chapters.lab.grader.diagnosis import diagnose
from minisgl.chapters.lab.grader.gate import SHRINK_SECONDS, Broken, Gate, Missing, Student
from minisgl.chapters.lab.grader.gate_process import LOADS
from minisgl.chapters.lab.verdicts import Report, Verdict
from minisgl.testing.serving import scaled_timeout

__all__ = ["ForkServer", "fingerprint", "grade", "with_server_gates"]

WATCHDOG_SECONDS = 10.0
"""Seconds after a gate's limit at which the process that should have killed the gate counts as hanging."""


class ForkServer:
    """A process that forks a child for each gate. A context manager.

    ``torch``: the process imports torch first. ``shrink_seconds``: for how long a gate shrinks a failing workload.
    The attribute ``search_share`` is the share of its usual workloads and time that a gate's search takes.
    """

    def __init__(self, torch: bool = False, shrink_seconds: float = SHRINK_SECONDS):
        self._shrink_seconds = shrink_seconds
        self.search_share = 1.0
        modules = [
            "numpy",
            "minisgl.testing.drive",
            "minisgl.testing.cache",
            *(["torch", "minisgl.llm"] if torch else []),
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "minisgl.chapters.lab.grader.gate_process", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # Ctrl-C reaches the grader only, which then closes the process' standard input
        )
        self._rest = b""

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process and the gate that it is running."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def run(self, lab: Lab, path: Path, gate: Gate, seed: int, replay: Any = None, *, loud: bool = True) -> Verdict:
        """Run one gate on the file at ``path`` and return its verdict. A ``loud`` replay shows what the code prints."""
        limit = scaled_timeout(gate.limit)
        request = {"lab": lab.lab, "path": str(path), "gate": gate.name, "seed": seed, "limit": limit}
        request |= {"replay": replay, "loud": loud and replay is not None, "shrink_seconds": self._shrink_seconds}
        request["search_share"] = self.search_share
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        started = time.monotonic()
        verdict: Verdict | None = None
        workload: tuple[Any, str] | None = None
        for message in self._messages(limit + WATCHDOG_SECONDS):
            if "workload" in message:
                workload = message["workload"], message["show"]
            elif "verdict" in message:
                verdict = Verdict(**message["verdict"])
            elif "crash" in message:
                raise RuntimeError(f"gate {gate.name} of lab {lab.lab} has a bug of its own:\n{message['crash']}")
            else:
                verdict = verdict or self._ended(gate, message, workload)
        assert verdict is not None
        verdict.seconds = time.monotonic() - started
        return verdict

    def _ended(self, gate: Gate, message: dict[str, Any], workload: tuple[Any, str] | None) -> Verdict:
        """Return the verdict for a gate whose process ended without a verdict."""
        if message["late"]:
            seen = f"The code did not return within {gate.limit:.0f} s, and its process was killed."
            broken = Broken("hangs", "The code returns within its time limit.", seen)
        else:
            seen = f"The process ended with status {message['status']}, without an exception."
            broken = Broken("dies", "The process that runs the code does not end.", seen)
        if workload is not None:
            broken.workload, broken.show = workload
        return Verdict(gate.name, gate.says, gate.part).fail(broken)

    def _messages(self, seconds: float) -> Iterator[dict[str, Any]]:
        """Yield the process' messages, up to and including the one that reports the gate's end."""
        until = time.monotonic() + seconds
        assert self._process.stdout is not None
        while True:
            line, newline, rest = self._rest.partition(b"\n")
            if newline:
                self._rest = rest
                message = json.loads(line)
                yield message
                if "late" in message:
                    return
                continue
            ready = select.select([self._process.stdout], [], [], max(until - time.monotonic(), 0))[0]
            data = os.read(self._process.stdout.fileno(), 65536) if ready else b""
            if not data:
                self._process.kill()
                raise RuntimeError(
                    "the process that runs the gates has exited" if ready else "the process that runs the gates hangs"
                )
            self._rest += data


def with_server_gates(gates: Sequence[Gate], only: Sequence[str]) -> set[str]:
    """Return the names of the gates to run: ``only``, and those that ask the server before one of these does.

    A gate such as ``metrics`` reads what the requests of the earlier gate have left.
    """
    asking = [gate.name for gate in gates if gate.served]
    last = max((i for i, name in enumerate(asking) if name in only), default=-1)
    return {*only, *asking[: last + 1]}


def grade(
    lab: Lab,
    path: Path,
    *,
    seed: int | None = None,
    only: Sequence[str] = (),
    replay: Any = None,
    serve: bool = True,
    stop: bool = False,
    confirm: bool = False,
    fork_server: ForkServer | None = None,
    extra: Sequence[Gate] = (),
    prepare_served: Callable[[Any], None] = lambda served: None,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
) -> Report:
    """Grade a file and return the report.

    ``only`` names the gates to run (empty: all); see `with_server_gates`. ``replay`` is a workload for these gates.
    Each verdict is passed to ``on_verdict``. A red gate of a part stops only the later gates that grade no part, and
    those that need it; any other red gate stops all later gates. With ``stop``, any red gate stops all later gates.
    Without ``serve``, the gates that use the server do not run, so the report can't pass. ``extra`` gates run after the
    lab's own that use no server. With ``confirm``, the smallest failing workload runs again in a new process, so that
    the verdict says if the failure needs earlier workloads. ``prepare_served`` is called with the `Served` before its
    server starts. Raise ValueError if ``only`` names an unknown gate.
    """
    path = path.resolve()
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    report = Report(lab, str(path), fingerprint(path), seed)
    gates = [*([LOADS] if lab.plugin else []), *(gate for gate in lab.gates if not gate.served), *extra]
    gates += [gate for gate in lab.gates if gate.served]
    if not lab.gates:
        raise RuntimeError(f"lab {lab.lab} has no gates, so nothing can be graded")
    unknown = [name for name in only if name not in [gate.name for gate in gates]]
    if unknown:
        names = ", ".join(gate.name for gate in gates)
        raise ValueError(f"Lab {lab.lab} has no gate {unknown[0]!r}. Gates: {names}.")
    chosen = with_server_gates(gates, only)
    with contextlib.ExitStack() as stack:
        fork_server = fork_server or stack.enter_context(ForkServer(lab.torch))
        served: Any = None
        for gate in gates:
            if only and gate.name not in chosen:
                continue
            stopped_by = next((red for red in report.red if stop or _stops(red, gate)), None)
            stopped = stopped_by is not None
            verdict = Verdict(gate.name, gate.says, gate.part, tried=not stopped and (serve or not gate.served))
            if not verdict.tried:
                verdict.note = f"{gate.says}: blocked by {stopped_by.gate}" if stopped_by else ""
            elif gate.served:
                started = time.monotonic()
                if served is None:
                    from minisgl.chapters.lab.grader.server_gate import Served

                    server_class = getattr(lab.module, "SERVED", Served)
                    served = server_class(lab, path, report.sha256)
                    prepare_served(served)
                    stack.enter_context(served)
                verdict = _run_served(gate, served, lab, path, started)
            else:
                verdict = fork_server.run(lab, path, gate, seed, replay)
                if confirm and replay is None and _can_confirm(verdict):
                    _confirm(verdict, fork_server.run(lab, path, gate, seed, verdict.workload, loud=False))
            report.verdicts.append(verdict)
            on_verdict(verdict)
    return report


UNCONFIRMED = ("hangs", "memory", "dies", "unfinished")
"""Causes of which a second run shows nothing new."""


def _can_confirm(verdict: Verdict) -> bool:
    return verdict.workload is not None and not verdict.green and verdict.cause not in UNCONFIRMED


def _confirm(verdict: Verdict, alone: Verdict) -> None:
    """Correct a red verdict whose workload is right if it runs ``alone``, in a new process.

    The command that repeats such a failure runs all workloads of the seed, not the one.
    """
    if not alone.green:
        return
    verdict.seen = f"{verdict.seen} In a new process, this workload alone is right."
    verdict.cause, verdict.workload = "earlier", None


def _stops(red: Verdict, gate: Gate) -> bool:
    """Return whether a red gate stops a later gate. A part that is not written yet stops no other part."""
    return red.part is None or gate.part is None or (red.gate in gate.needs and red.cause != "unfinished")


def _run_served(gate: Gate, served: Any, lab: Lab, path: Path, started: float) -> Verdict:
    """Run a gate against the running server, in this process."""
    verdict = Verdict(gate.name, gate.says, gate.part)
    try:
        verdict.note = served.run(gate) or ""
    except Missing as error:  # not the file's fault: the gate counts as not tried, and earlier verdicts stay
        verdict.tried, verdict.note = False, str(error)
    except Exception as error:
        verdict.fail(diagnose(Student(lab, path), error))
    verdict.seconds = time.monotonic() - started
    return verdict


def fingerprint(path: Path) -> str:
    """Return the SHA-256 of a file; for a folder, of the names and contents of its Python files."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*.py")):
        digest.update(str(file.relative_to(path)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
