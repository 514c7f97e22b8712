"""The commands about more than one lab: ``serve``, ``ladder``, ``promises``, ``card``, ``arena`` and ``break``."""

from __future__ import annotations

import argparse
import os
import random
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from minisgl.chapters.lab.arena.command import add_arena, run_arena
from minisgl.chapters.lab.catalog import Lab, find
from minisgl.chapters.lab.folder import Folder
from minisgl.chapters.lab.grader.grade import ForkServer, fingerprint
from minisgl.chapters.lab.mine.card import Card, draw_card, html_card, rung_name
from minisgl.chapters.lab.mine.engine import own_parts, own_versions, parts_of
from minisgl.chapters.lab.mine.rungs import COUNTS, changes, is_counted, measure, rungs_of
from minisgl.chapters.lab.mine.schedules import CHECKED, run_schedules
from minisgl.chapters.lab.museum.command import add_break, museum_line, run_break
from minisgl.chapters.lab.museum.pieces import pieces

__all__ = ["ENGINE_COMMANDS", "add_engine_commands", "after_lab", "gates_line", "measure_stretch"]

RUNS = 1000
"""Random schedules of the command ``promises``, if the student asks for no other number."""


def add_engine_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands. ``add(name, text, lab=False)`` returns the parser of a new command."""
    serve = add("serve", "start the server with all your finished parts at once", lab=False)
    serve.add_argument("--without", metavar="LAB", action="append", default=[], help="leave out the part of this lab")
    serve.add_argument("--print", action="store_true", help="print the command, and start nothing")
    serve.add_argument(
        "options", nargs="*", help="more options of the server, such as model=tutor-moe server.port=8000"
    )
    add("ladder", "count what each of your finished labs gains, on the workload of the course", lab=False)
    promises = add("promises", "run random schedules through your engine, and check the promises", lab=False)
    promises.add_argument("--runs", type=_positive, default=RUNS, help=f"number of schedules (default: {RUNS})")
    promises.add_argument("--seed", type=int, help="repeat the schedules of an earlier run")
    promises.add_argument("--only", type=_positive, metavar="N", help="run only the schedule N of the seed")
    card = add("card", "write your result card: my_engine.svg and my_engine.html", lab=False)
    card.add_argument("--name", default="My engine", help="the title of the card, such as your name")
    add_arena(add)
    add_break(add)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def _serve(folder: Folder, options: argparse.Namespace) -> int:
    for name in options.without:
        find(name)
    engine = parts_of(own_parts(folder), options.options, options.without)
    for part in engine.used:
        print(f"yours:    {part.lab.lab:<9} {part.path.name}")
    for part, reason in engine.left_out:
        print(f"left out: {part.lab.lab:<9} {reason}")
    if not engine.used:
        print("No lab is finished yet, so every part is a shipped one.")
    command = [sys.executable, "-m", "minisgl", *engine.words]
    print(f"{shlex.join(['python', *command[1:]])}", flush=True)
    if options.print:
        return 0
    env = dict(os.environ)
    if engine.python_path:
        env["PYTHONPATH"] = os.pathsep.join([*engine.python_path, *filter(None, [env.get("PYTHONPATH")])])
    os.execve(sys.executable, command, env)


def _ladder(folder: Folder, options: argparse.Namespace) -> int:
    parts = own_parts(folder)
    rungs = rungs_of(parts)
    names = "".join(f"{name:>17}" for name in COUNTS.values())
    print(f"{len(rungs)} engines are counted, a few seconds each.\n{'engine':<26}{names}", flush=True)
    found = []
    for rung in measure(rungs):
        found.append(rung)
        counts = f"  {rung['error']}" if "error" in rung else "".join(f"{rung[key]:>17,}" for key in COUNTS)
        print(f"{rung_name(rung, parts):<26}{counts}", flush=True)
    folder.remember_engine("ladder", {"files": own_versions(parts), "rungs": found})
    other = [part.lab.lab for part in parts if part.finished and not is_counted(part)]
    if other:
        print(f"Not on the ladder, because they change no decision of the scheduler: {', '.join(other)}. "
              "The card has their numbers.")  # fmt: skip
    return int(any("error" in rung for rung in found))


def _promises(folder: Folder, options: argparse.Namespace) -> int:
    parts = own_parts(folder)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    held = run_schedules(parts, options.runs, seed, only=options.only, say=lambda text: print(text, flush=True))
    if options.only is None:
        measured = {"files": own_versions(parts), "runs": held.runs, "seed": held.seed}
        folder.remember_engine("promises", {**measured, "failed": held.failed, "text": held.text})
    if not held.held:
        where = "" if options.dir == "." else f" --dir {shlex.quote(options.dir)}"
        print(f"Schedule {held.failed} failed: {held.text}\nAgain: python -m minisgl.lab promises{where} --seed {seed} "
              f"--only {held.failed}")  # fmt: skip
        return 1
    print(f"{held.runs:,} random schedules (seed {seed}, {held.seconds:.0f} s): no promise was broken. Checked:")
    for number, text in CHECKED.items():
        print(f"  promise {number}: {text}")
    return 0


def _card(folder: Folder, options: argparse.Namespace) -> int:
    for part in own_parts(folder):
        if part.finished and part.stretch is None and part.lab.stretch:
            print(f"measuring the number to beat of {part.lab.lab}: "
                  f"{measure_stretch(part.lab, part.path, folder, 0)}", flush=True)  # fmt: skip
    measured = folder.recall_engine("ladder"), folder.recall_engine("promises")
    card = Card(options.name, own_parts(folder), *measured, museum_line(folder))
    for name, text in (("my_engine.svg", draw_card(card)), ("my_engine.html", html_card(card))):
        (folder.path / name).write_text(text, "utf-8")
        print(f"wrote {folder.path / name}")
    print(f"{card.headline}.\n{card.promises_line()}.\n{card.museum}.")
    return 0


def measure_stretch(lab: Lab, path: Path, folder: Folder, seed: int) -> str:
    """Measure the task beyond the lab, save the result, and return it in a line."""
    assert lab.stretch is not None
    with ForkServer(lab.torch) as server:
        verdict = server.run(lab, path.resolve(), lab.stretch.gate, seed)
    if not verdict.green:
        return f"Not measured: {verdict.seen or verdict.note}"
    counted, _, said = verdict.note.rpartition(": ")
    folder.remember_stretch(lab, fingerprint(path), counted, said == "beaten")
    return f"Yours: {verdict.note}."


def gates_line(folder: Folder, lab: Lab, path: Path) -> str:
    """Return a line that says which gates are not green for the file as it is now, otherwise nothing."""
    part = next(part for part in own_parts(folder) if part.lab.lab == lab.lab)
    if part.finished and part.sha256 == fingerprint(path):
        return ""
    seen = "The gates are not graded for the file as it is now"
    if part.failed and part.sha256 == fingerprint(path):
        seen = f"Red for this file: gate {', '.join(part.failed)}"
    elif part.green and part.sha256 == fingerprint(path):
        seen = f"{part.green} of {part.total} gates are green for the file as it is now, and the others are not graded"
    return f"{seen}. A number counts as beaten only with green gates: python -m minisgl.lab test {lab.lab}\n"


def after_lab(folder: Folder, lab: Lab) -> str:
    """Return what a finished lab changed in the student's engine: the counts before and after it, if it has a rung."""
    parts = own_parts(folder)
    number = sum(part.finished for part in parts)
    text = f"Your engine has {number} of {len(parts)} parts of your own: python -m minisgl.lab serve"
    changed = [part.lab.lab for part in parts if part.changed]
    if changed:
        text += f"\nOpen again, because their files have changed since they were graded: {', '.join(changed)}"
    broken = [piece.name for piece in pieces() if piece.lab == lab.lab]
    if broken:
        text += (
            f"\nFaults of real engines that go with it: {', '.join(broken)}: python -m minisgl.lab break {broken[0]}"
        )
    rungs = rungs_of(parts)
    at = next((i for i, rung in enumerate(rungs) if rung.lab == lab.lab), 0)
    if at:
        before, after = measure(rungs[at - 1 : at + 1])
        counts = changes(before, after)
        if counts:
            text += f"\nWhat {lab.lab} changed in it, on the 44 requests of the ladder: {', '.join(counts)}. "
            text += "Most ideas have a price."
    return text


ENGINE_COMMANDS: dict[str, Callable[[Folder, argparse.Namespace], int]] = {
    "serve": _serve,
    "ladder": _ladder,
    "promises": _promises,
    "card": _card,
    "arena": run_arena,
    "break": run_break,
}
