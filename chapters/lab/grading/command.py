"""``python -m minisgl.lab grade DIR``: grade students' files on the instructor's machine.

For each lab it builds one clean installation, and for each submission it starts one `runner`, which starts the
student's processes. This process reads the runner's lines. It imports no student's file.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from minisgl.chapters.lab.catalog import Lab, find
from minisgl.chapters.lab.grader.gate import Gate
from minisgl.chapters.lab.grading import report
from minisgl.chapters.lab.grading.clean_tree import CleanTree, make_writable
from minisgl.chapters.lab.grading.intake import RefusedError, take_in
from minisgl.chapters.lab.grading.private import private_gates
from minisgl.chapters.lab.grading.submissions import Submission, submissions
from minisgl.chapters.lab.grading.text import one_line
from minisgl.chapters.lab.signals import signals_raise
from minisgl.config import ConfigError

__all__ = ["add_options", "grade_folder"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("folder", metavar="DIR", help="the folder with the submissions, or with a folder per student")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--output", metavar="FILE", help="also write the JSON report into this file")
    parser.add_argument("--lab", action="append", default=[], help="grade only this lab (may be repeated)")
    parser.add_argument("--gate", action="append", default=[], help="run only this gate (may be repeated)")
    parser.add_argument("--gates", metavar="FILE", help="a Python file with private gates")
    parser.add_argument("--user", help="run the students' code as this user (default: the user 65534, if you are root)")
    parser.add_argument("--seed", type=int, help="repeat the random workloads of an earlier run")


def grade_folder(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    if sys.platform != "linux":
        raise ConfigError("`lab grade` needs Linux: it isolates the students' processes with namespaces and limits.")
    labs = [find(name).lab for name in options.lab]
    given = submissions(Path(options.folder), labs)
    gates = None if options.gates is None else Path(options.gates).resolve()
    private = {} if gates is None else private_gates(gates)
    _check_gates(options.gate, given, private)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    started, now = time.monotonic(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    results, isolation = [], None
    with signals_raise(), Graders(seed, gates, options.user, options.gate) as graders:
        for submission in given:
            result, isolation_of = graders.grade(submission, private.get(submission.lab.lab, []))
            results.append(result)
            isolation = isolation or isolation_of
            if not options.json:
                print("\n".join(report.lines(result)), flush=True)
    done = report.document(
        results, seed=seed, started=now, seconds=time.monotonic() - started, isolation=isolation, gates=gates
    )
    if options.output:
        Path(options.output).write_text(json.dumps(done, indent=1) + "\n", "utf-8")
    if options.json:
        print(json.dumps(done, indent=1))
    else:
        _print_end(done)
    return report.exit_status(results)


def _check_gates(only: list[str], given: list[Submission], private: dict[str, list[Gate]]) -> None:
    """Raise `ConfigError` for a gate in ``--gate`` that no lab of the submissions has."""
    labs = {submission.lab.lab: submission.lab for submission in given}
    known = {gate.name for lab in labs.values() for gate, _ in report.gates_of(lab, private.get(lab.lab, []))}
    for name in only:
        if name not in known:
            raise ConfigError(f"--gate {name}: no lab of these submissions has this gate.")


def _print_end(done: dict[str, Any]) -> None:
    print(f"{done['points']:g} of {done['max_points']:g} points in all. Seed {done['seed']}, minisgl {done['course']}.")
    isolation = done["isolation"]
    if isolation is None:
        return
    parts = [name for name in ("network", "files", "processes") if isolation[name]]
    user = f"user {isolation['user']}" if isolation["user"] else "NOT isolated by user"
    print(f"Isolated: {', '.join(parts) or 'nothing'}; {user}.")
    for note in isolation["notes"]:
        print(f"  {one_line(note)}")


class Graders:
    """The clean installations, one for each lab, and the runs of the grader. A context manager."""

    def __init__(self, seed: int, gates: Path | None, user: str | None, only: list[str]):
        self.seed, self.gates, self.user, self.only = seed, gates, user, only
        self.folder = Path(tempfile.mkdtemp(prefix="minisgl-clean-"))
        self.folder.chmod(0o755)
        self.trees: dict[str, CleanTree] = {}

    def __enter__(self) -> Graders:
        return self

    def __exit__(self, *error: object) -> None:
        make_writable(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)

    def tree(self, lab: Lab) -> CleanTree:
        """Return the clean installation of a lab. It is built at its first use."""
        if lab.lab not in self.trees:
            self.trees[lab.lab] = CleanTree(lab, self.folder / lab.lab)
        return self.trees[lab.lab]

    def grade(self, submission: Submission, private: list[Gate]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Grade a copy of a submission. Return its result, and the isolation of the student's processes.

        A refused submission has no isolation, because no process is started.
        """
        started, cpu = time.monotonic(), _cpu_seconds()
        with tempfile.TemporaryDirectory(prefix="submission-", dir=self.folder) as folder:
            copy = dataclasses.replace(submission, path=Path(folder, submission.lab.file))
            try:
                take_in(submission.path, copy.path, folder=not submission.lab.plugin)
            except RefusedError as reason:
                return report.refused_result(submission, private, str(reason), only=self.only), None
            return self._graded(copy, private, started, cpu)

    def _graded(
        self, submission: Submission, private: list[Gate], started: float, cpu: float
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        told = self._told(submission)
        verdicts = [line["verdict"] for line in told if "verdict" in line]
        failed = next((line["failed"] for line in told if "failed" in line), None)
        if failed is None and not any("end" in line for line in told):
            failed = "the process that grades the submission has ended"
        result = report.result_of(
            submission, private, verdicts, only=self.only, failed=failed, seconds=time.monotonic() - started,
            cpu_seconds=_cpu_seconds() - cpu,
        )  # fmt: skip
        return result, next((line["isolation"] for line in told if "isolation" in line), None)

    def _told(self, submission: Submission) -> list[dict[str, Any]]:
        """Run the grader of one submission and return the lines that it writes."""
        lab = submission.lab
        request = {
            "lab": lab.lab,
            "path": str(submission.path.resolve()),
            "tree": str(self.tree(lab).at),
            "user": self.user,
            "gates": None if self.gates is None else str(self.gates),
            "seed": self.seed,
            "only": self.only,
            "serve": True,
        }
        command = [sys.executable, "-m", "minisgl.chapters.lab.grading.runner"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace", env=env
        ) as process:
            try:
                out, err = process.communicate(json.dumps(request) + "\n")
            except BaseException:
                process.terminate()  # it ends the student's processes, and the end of this block waits for it
                raise
        for line in err.splitlines():  # what gates print may contain a student's text
            print(f"  stderr: {one_line(line)}", file=sys.stderr)
        told = []
        for line in out.splitlines():
            with contextlib.suppress(ValueError):
                told.append(json.loads(line))
        return told


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
