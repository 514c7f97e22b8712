"""``python -m minisgl.lab``: start a lab, grade a file, print a hint.

Parses the command line and prints the results. `minisgl.chapters.lab.folder` reads and writes the student's files;
`minisgl.chapters.lab.grader.grade` grades them.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import random
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from minisgl.chapters.lab.catalog import Lab, find, labs
from minisgl.chapters.lab.folder import Folder
from minisgl.chapters.lab.grader.grade import fingerprint, grade
from minisgl.chapters.lab.grading.command import add_options, grade_folder
from minisgl.chapters.lab.mine.commands import (
    ENGINE_COMMANDS,
    add_engine_commands,
    after_lab,
    gates_line,
    measure_stretch,
)
from minisgl.chapters.lab.mine.drawing import draw_text, is_coloured, is_utf8
from minisgl.chapters.lab.mine.engine import OwnPart, own_parts
from minisgl.chapters.lab.museum.command import museum_line
from minisgl.chapters.lab.skeletons import HEADER, solution
from minisgl.chapters.lab.verdicts import Verdict
from minisgl.chapters.lab.watch import watch
from minisgl.config import ConfigError
from minisgl.options.compose import plain_errors
from minisgl.utils.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Return the exit status: 0, 1 if a gate is red, 2 if the command line is invalid.

    The command ``grade`` returns 3 if the grader itself has failed.
    """
    options, rest = _parser().parse_known_args(argv)
    if rest and options.command != "serve":
        _parser().parse_args(argv)  # reports the argument that is not known, and exits
    with plain_errors("minisgl.lab"):
        folder = Folder(Path(options.dir))
        if options.command in ENGINE_COMMANDS:
            if options.command == "serve":
                options.options += rest
            return ENGINE_COMMANDS[options.command](folder, options)
        if options.command == "grade":
            return grade_folder(options)
        if options.command in ("list", "status"):
            return _list(folder, options.command == "status")
        if options.command == "hint" and options.part is None and "." in options.name:  # a part's whole name
            options.name, _, options.part = options.name.partition(".")
        return COMMANDS[options.command](find(options.name), folder, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m minisgl.lab", description="The labs of the course.")
    parser.set_defaults(dir=".")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, text: str, lab: bool = True) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--dir", default=".", help="your folder (default: the current folder)")
        if lab:
            command.add_argument("name", metavar="NAME", help="the lab's name")
        return command

    add("list", "list all labs", lab=False)
    add("status", "show your results", lab=False)
    add("start", "write a lab's skeleton into your folder; an existing file is never overwritten")
    test = add("test", "grade your file")
    test.add_argument("path", nargs="?", help="the file to grade (default: my_NAME.py in your folder)")
    test.add_argument("--seed", type=int, help="repeat the random workloads of an earlier run")
    test.add_argument("--gate", action="append", default=[], help="run only this gate (may be repeated)")
    test.add_argument("--replay", metavar="FILE", help="run one saved workload again and show what your code prints")
    test.add_argument("--first", action="store_true", help="end at the first gate that fails")
    test.add_argument("--beat", action="store_true", help="measure only the number to beat, without the gates")
    watch = add("watch", "grade your file whenever you save it, up to the first gate that fails")
    watch.add_argument("path", nargs="?", help="the file to grade (default: my_NAME.py in your folder)")
    hint = add("hint", "print one more hint")
    hint.add_argument("part", nargs="?", help="the part (default: the first part whose gate is not green)")
    add_options(add("grade", "for instructors: grade all files of a folder, in isolated processes", lab=False))
    add_engine_commands(add)
    diff = add("diff", "compare your file with the reference solution")
    diff.add_argument("path", nargs="?", help="the file to compare (default: my_NAME.py in your folder)")
    return parser


# ---- the commands --------------------------------------------------------------------------------------


def _list(folder: Folder, status: bool) -> int:
    if status:
        return _status(folder)
    for lab in labs():
        print(f"{lab.lab:<9} {lab.hook or 'any hook':<13} {lab.title}")
    return 0


def _status(folder: Folder) -> int:
    known, parts = folder.recall(), own_parts(folder)
    if not known:
        print(f"There are no results in {folder.path.resolve()}. `test` saves results in the folder in which it runs.")
    for part in parts:
        print(f"{part.lab.lab:<9} {_bar(part.green, part.total)} {_progress(known.get(part.lab.lab, {}), part)}")
    greens, totals = sum(part.green for part in parts), sum(part.total for part in parts)
    print(f"{'course':<9} {_bar(greens, totals)} {greens} of {totals} gates green")
    print(f"{museum_line(folder)}: python -m minisgl.lab break\n")
    print(draw_text(parts, plain=not is_utf8(), colour=is_coloured()))
    return 0


def _bar(done: int, total: int, width: int = 20) -> str:
    """Return a progress bar. It is full only if everything is done."""
    filled = width * done // total
    full, empty = "█░" if is_utf8() else "#-"
    return full * filled + empty * (width - filled)


def _is_graded(done: dict[str, Any]) -> bool:
    return {"path", "sha256", "green", "gates"} <= done.keys()


def _progress(done: dict[str, Any], part: OwnPart) -> str:
    if not _is_graded(done):
        return "not graded yet"
    if part.file is None:
        return (
            f"{len(done['green'])} of {len(done['gates'])} gates were green, but {done['path']} does not exist any more"
        )
    if part.changed:
        before = f"{len(done['green'])} of {len(done['gates'])}"
        return f"open again: the file has changed since {before} gates were green"
    return f"{part.green} of {part.total} gates green{', next: ' + part.red if part.red else ''}"


def _start(lab: Lab, folder: Folder, options: argparse.Namespace) -> int:
    for path in folder.start(lab):
        print(f"wrote {path}")
    print(lab.says)
    for part in lab.parts:
        print(f"  {part.name}: {part.says}")
    print(f"Grade it: python -m minisgl.lab test {lab.lab}")
    return 0


def _test(lab: Lab, folder: Folder, options: argparse.Namespace) -> int:
    if options.beat and lab.stretch is None:
        raise ConfigError(f"Lab {lab.lab} has no number to beat.")
    path = folder.find(lab, options.path)
    only, replay = options.gate, None
    if options.replay:
        only, replay = _read_workload(lab, Path(options.replay))

    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    if options.beat:
        print(f"{measure_stretch(lab, path, folder, seed)} Seed {seed}.")
        print(gates_line(folder, lab, path), end="")
        return 0

    reds: list[Verdict] = []

    def print_verdict(verdict: Verdict) -> None:
        if options.first and not verdict.tried:
            return
        print(verdict.line(), flush=True)
        if verdict.tried and not verdict.green:
            again = _again(lab, folder, options, verdict, seed)
            same = next((red for red in reds if red.says_the_same(verdict)), None)
            lines = verdict.explain(lab, again) if same is None else [f"    The same failure as in gate {same.gate}."]
            print("\n".join(lines), flush=True)
            reds.append(verdict)

    print(f"lab {lab.lab}: {path.resolve()}, sha256 {fingerprint(path)[:12]}, seed {seed}, minisgl {__version__}",
          flush=True)  # fmt: skip
    try:
        report = grade(
            lab, path, seed=seed, only=only, replay=replay, stop=options.first, confirm=True, on_verdict=print_verdict
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not options.replay:
        folder.remember_report(report, lab.gate_names)
    green = sum(verdict.green for verdict in report.verdicts)
    print(
        f"{green} of {len(report.verdicts)} gates green" + (": the lab is done." if report.passed and not only else ".")
    )
    if report.passed and not only and lab.plugin:
        print(f"Serve it: {lab.command}")
    if report.passed and not only and lab.stretch:
        seen = "stretch" in folder.recall().get(lab.lab, {})
        print("The number to beat" if seen else f"A number to beat, not graded: {lab.stretch.says}", end="\n  ")
        print(measure_stretch(lab, path, folder, seed))
    if report.passed and not only:
        print(after_lab(folder, lab))
    return 0 if report.passed else 1


def _watch(lab: Lab, folder: Folder, options: argparse.Namespace) -> int:
    path = folder.find(lab, options.path)
    command = [sys.executable, "-m", "minisgl.lab", "test", lab.lab, str(path), "--dir", options.dir, "--first"]

    def before_run() -> None:
        if sys.stdout.isatty():
            print("\x1b[2J\x1b[H", end="")  # an empty screen
        print(f"{time.strftime('%H:%M:%S')}: grading {path}, and again when you save it. Ctrl-C ends this.", flush=True)

    watch(path, command, before_run)
    results = folder.recall()
    for other in labs():
        done = results.get(other.lab, {})
        if not _is_graded(done) or done["green"] != done["gates"]:
            print(f"Next: python -m minisgl.lab start {other.lab}")
            break
    return 0


def _again(lab: Lab, folder: Folder, options: argparse.Namespace, verdict: Verdict, seed: int) -> str:
    """Return the command that reproduces a failure."""
    words = ["python", "-m", "minisgl.lab", "test", lab.lab, *([options.path] if options.path else [])]
    if options.dir != ".":
        words += ["--dir", options.dir]
    if verdict.workload is None:
        return shlex.join([*words, "--gate", verdict.gate, "--seed", str(seed)])
    kept = folder.keep_workload(lab, verdict.gate, verdict.workload)
    return shlex.join([*words, "--replay", os.path.relpath(kept)])


def _read_workload(lab: Lab, path: Path) -> tuple[list[str], Any]:
    try:
        kept = json.loads(path.read_text("utf-8"))
        name, gate, workload = kept["lab"], kept["gate"], kept["workload"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--replay {path}: the file is not a workload that `test` has saved ({error}).") from error
    if name != lab.lab:
        raise ConfigError(f"--replay {path}: the workload belongs to lab {name}, not to lab {lab.lab}.")
    return [gate], workload


def _hint(lab: Lab, folder: Folder, options: argparse.Namespace) -> int:
    if not lab.parts:
        raise ConfigError(f"Lab {lab.lab} has no parts and no hints. Its chapter of the course explains what to do.")
    known = folder.recall().get(lab.lab, {})
    part = next(
        (part for part in lab.parts if part.name.rpartition(".")[2] == (options.part or "").rpartition(".")[2]), None
    )
    if options.part and part is None:
        raise ConfigError(f"Lab {lab.lab} has no part {options.part!r}. Parts: {', '.join(p.name for p in lab.parts)}.")
    if part is None and {gate.name for gate in lab.gates} <= set(known.get("green", ())):
        names = [part.name.rpartition(".")[2] for part in lab.parts]
        print(
            f"All gates of lab {lab.lab} are green. To see the hints of a part, name the part, for example: "
            f"python -m minisgl.lab hint {lab.lab} {names[0]}\nParts: {', '.join(names)}."
        )
        return 0
    if part is None:
        done = {gate.part for gate in lab.gates if gate.name in known.get("green", ())}
        part = next((part for part in lab.parts if part.name not in done), lab.parts[-1])
    given = min(known.get("hints", {}).get(part.name, 0) + 1, len(part.hints))
    folder.remember(lab, hints={**known.get("hints", {}), part.name: given})
    for number, hint in enumerate(part.hints[:given], 1):
        print(f"{part.name}, hint {number} of {len(part.hints)}: {hint}")
    if given == len(part.hints):
        print(f"This was the last hint. To compare your file with the solution: python -m minisgl.lab diff {lab.lab}")
    return 0


def _diff(lab: Lab, folder: Folder, options: argparse.Namespace) -> int:
    if not lab.plugin:
        raise ConfigError(f"Lab {lab.lab} has no reference solution to compare with.")
    path = folder.find(lab, options.path)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    mine = [line for line in text.splitlines() if not HEADER.match(line)]
    reference = [line for line in solution(lab).splitlines() if not HEADER.match(line)]
    for line in difflib.unified_diff(mine, reference, str(path), f"{lab.plugin} (renamed)", lineterm=""):
        print(line)
    return 0


COMMANDS: dict[str, Callable[[Lab, Folder, argparse.Namespace], int]] = {
    "start": _start,
    "test": _test,
    "watch": _watch,
    "hint": _hint,
    "diff": _diff,
}


def run() -> None:
    """Run the command line and exit with its status."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
