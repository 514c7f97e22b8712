"""Grades one file: each gate in a process under a watchdog, then the real server. Says what it graded, and how.

Knows gates and verdicts. What the student's code does is never run in this process.
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

from minisgl.course.lab.catalog import Lab
from minisgl.course.lab.grader.blame import blame
from minisgl.course.lab.grader.gate import Broken, Gate, Missing, Student
from minisgl.course.lab.grader.gate_process import LOADS
from minisgl.course.lab.verdicts import Report, Verdict
from minisgl.testing.serving import patience

__all__ = ["Nursery", "grade"]

SLACK = 10.0
"""Seconds beside a gate's own limit after which its watchdog itself counts as dead."""


class Nursery:
    """A process that forks one for each gate. Use it as a context manager. ``torch``: import that first."""

    def __init__(self, torch: bool = False):
        modules = [
            "numpy",
            "minisgl.testing.drive",
            "minisgl.testing.cache",
            *(["torch", "minisgl.llm"] if torch else []),
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "minisgl.course.lab.grader.gate_process", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # the keyboard's interrupt is for the grader, which then closes its input
        )
        self._rest = b""

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it, and what it watches."""
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

    def run(self, lab: Lab, path: Path, gate: Gate, seed: int, replay: Any = None) -> Verdict:
        """What the gate says of the file."""
        limit = patience(gate.limit)
        asked = {"lab": lab.lab, "path": str(path), "gate": gate.name, "seed": seed, "limit": limit}
        asked |= {"replay": replay, "loud": replay is not None}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        begun = time.monotonic()
        verdict: Verdict | None = None
        doing: tuple[Any, str] | None = None
        for news in self._lines(limit + SLACK):
            if "doing" in news:
                doing = news["doing"], news["show"]
            elif "verdict" in news:
                verdict = Verdict(**news["verdict"])
            elif "crash" in news:
                raise RuntimeError(f"gate {gate.name} of lab {lab.lab} failed by itself:\n{news['crash']}")
            else:
                verdict = verdict or self._ended(gate, news, doing)
        assert verdict is not None
        verdict.seconds = time.monotonic() - begun
        return verdict

    def _ended(self, gate: Gate, news: dict[str, Any], doing: tuple[Any, str] | None) -> Verdict:
        """A gate whose process ended without a verdict."""
        if news["late"]:
            broken = Broken(
                "hangs", "It comes back.", f"Nothing came back for {gate.limit:.0f} s; the process was ended."
            )
        else:
            broken = Broken("dies", "Its process goes on.", f"The process ended with status {news['status']}.")
        if doing is not None:
            broken.workload, broken.show = doing
        return Verdict(gate.name, gate.says, gate.part).blame(broken)

    def _lines(self, seconds: float) -> Iterator[dict[str, Any]]:
        """What the child says, up to and with the end of the gate."""
        until = time.monotonic() + seconds
        assert self._process.stdout is not None
        while True:
            line, newline, rest = self._rest.partition(b"\n")
            if newline:
                self._rest = rest
                news = json.loads(line)
                yield news
                if "late" in news:
                    return
                continue
            ready = select.select([self._process.stdout], [], [], max(until - time.monotonic(), 0))[0]
            data = os.read(self._process.stdout.fileno(), 65536) if ready else b""
            if not data:
                self._process.kill()
                raise RuntimeError("the process that runs the gates is gone" if ready else "the watchdog hangs")
            self._rest += data


def grade(
    lab: Lab,
    path: Path,
    *,
    seed: int | None = None,
    only: Sequence[str] = (),
    replay: Any = None,
    serve: bool = True,
    stop: bool = False,
    nursery: Nursery | None = None,
    tell: Callable[[Verdict], None] = lambda verdict: None,
) -> Report:
    """Grade a file. ``only`` names the gates to try (empty: all), ``replay`` is a workload for them; ``tell`` hears
    each verdict as it comes. Gates of parts are all tried; the others stop at the first that is red (with ``stop``, so
    do they). Without ``serve`` the gates beside a server are left out: such a report never says that a lab is done."""
    path = path.resolve()
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    report = Report(lab, str(path), fingerprint(path), seed)
    gates = [*([LOADS] if lab.plugin else []), *lab.gates]
    if not lab.gates:
        raise RuntimeError(f"lab {lab.lab} has no gates: nothing would be graded")
    unknown = [name for name in only if name not in [gate.name for gate in gates]]
    if unknown:
        raise ValueError(f"lab {lab.lab} has no gate {unknown[0]!r}: {', '.join(gate.name for gate in gates)}")
    with contextlib.ExitStack() as stack:
        nursery = nursery or stack.enter_context(Nursery(lab.torch))
        served: Any = None
        for gate in gates:
            if only and gate.name not in only:
                continue
            late = any(stop or red.part is None or gate.part is None for red in report.red)
            verdict = Verdict(gate.name, gate.says, gate.part, tried=not late and (serve or not gate.served))
            if not verdict.tried:
                pass
            elif gate.served:
                begun = time.monotonic()
                if served is None:
                    from minisgl.course.lab.grader.server_gate import Served

                    made = getattr(lab.module, "SERVED", Served)
                    served = stack.enter_context(made(lab, path, report.sha256))
                verdict = _beside_the_server(gate, served, lab, path, begun)
            else:
                verdict = nursery.run(lab, path, gate, seed, replay)
            report.verdicts.append(verdict)
            tell(verdict)
    return report


def _beside_the_server(gate: Gate, served: Any, lab: Lab, path: Path, begun: float) -> Verdict:
    verdict = Verdict(gate.name, gate.says, gate.part)
    try:
        verdict.note = served.run(gate) or ""
    except Missing as error:  # says nothing about the file, and what was graded so far is kept
        verdict.tried, verdict.note = False, str(error)
    except Exception as error:
        verdict.blame(blame(Student(lab, path), error))
    verdict.seconds = time.monotonic() - begun
    return verdict


def fingerprint(path: Path) -> str:
    """SHA-256 of a file; of a folder, over its Python files and their names."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*.py")):
        digest.update(str(file.relative_to(path)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
