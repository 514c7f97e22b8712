"""The command ``break``: shows a museum piece, checks an answer and grades a mended file."""

from __future__ import annotations

import argparse
import random
import shlex
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minisgl.chapters.lab.child import ChildError, ask_child
from minisgl.chapters.lab.folder import Folder
from minisgl.chapters.lab.grader.gate import amount
from minisgl.chapters.lab.grader.grade import fingerprint
from minisgl.chapters.lab.museum.pieces import Piece, find_piece, pieces
from minisgl.config import ConfigError
from minisgl.testing.serving import scaled_timeout

__all__ = ["add_break", "museum_line", "run_break"]

SECONDS = 240.0
"""Seconds that a run of a piece may take, on a machine with an idle core. A mended file needs a few."""
UNITS = {
    "computed": "prompt tokens were computed",
    "steps": "steps were needed",
    "waited": "turns were spent waiting for first tokens",
    "lasted": "turns passed from arrivals to final replies",
    "moved": "bytes were moved",
    "kept": "numbers were kept",
    "rows": "rows were computed",
    "recorded": "rows were recorded",
    "sent": "bytes were sent",
    "exchanged": "numbers were exchanged by the ranks",
    "messages": "messages were sent",
    "walked": "bytes of the vocabulary were read",
    "weights": "weights were loaded",
    "read": "numbers of the weights were read",
    "made": "bytes of tensors were made",
}
"""What a run counts, and what it means. More of it than the base needs is no mend."""
_WIDTH = 110  # characters of a line
_KEY = "museum"  # of the folder's saved measurements


def add_break(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command. ``add(name, text, lab=False)`` returns the parser of a new command."""
    parser = add("break", "the museum: find, explain and mend a famous fault of a real engine", lab=False)
    parser.add_argument("name", nargs="?", metavar="NAME", help="the piece (none: list all pieces)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--answer", nargs="+", metavar="promise=N step=M method=NAME",
                      help="name the broken promise, the first step in which it is broken, and the method that must "
                           "change")  # fmt: skip
    what.add_argument("--grade", nargs="?", const="", metavar="FILE",
                      help="grade the mended file (default: museum_NAME.py in your folder)")  # fmt: skip
    parser.add_argument("--seed", type=int, help="with --grade: repeat the random schedules of an earlier run")


def run_break(folder: Folder, options: argparse.Namespace) -> int:
    """Run the command. Return 0, or 1 if an answer is wrong or a file is not mended."""
    if options.name is None:
        if options.answer or options.grade is not None:
            raise ConfigError("break: name the piece first, as in: python -m minisgl.lab break lock --grade")
        return _list(folder)
    piece = find_piece(options.name)
    if options.answer:
        return _answer(piece, folder, options.answer)
    if options.grade is not None:
        return _grade(piece, folder, options)
    return _show(piece, folder, options)


# ---- what is saved ---------------------------------------------------------------------------------------


def _known(folder: Folder) -> dict[str, dict[str, Any]]:
    known = folder.recall_engine(_KEY)
    known = known if isinstance(known, dict) else {}
    return {name: state for name, state in known.items() if isinstance(state, dict)}


def _remember(folder: Folder, piece: Piece, **entries: Any) -> None:
    known = _known(folder)
    folder.remember_engine(_KEY, {**known, piece.name: {**known.get(piece.name, {}), **entries}})


def _is_mended(folder: Folder, state: dict[str, Any]) -> bool:
    """Return whether the file that was graded as mended is still the same."""
    path = Path(state.get("path", ""))
    return path.is_file() and fingerprint(path) == state.get("mended")


def _state(piece: Piece, folder: Folder, state: dict[str, Any]) -> str:
    if not state and not (folder.path / piece.file).exists():
        return "not seen yet"
    named = "named" if state.get("named") else "not named yet"
    if _is_mended(folder, state):
        return f"{named}, mended"
    return f"{named}, {'mended, but changed since' if 'mended' in state else 'not mended yet'}"


def museum_line(folder: Folder) -> str:
    """Return how many pieces of the museum are named and mended, in a line."""
    known = _known(folder)
    named = sum(bool(state.get("named")) for state in known.values())
    mended = sum(_is_mended(folder, state) for state in known.values())
    return f"{mended} of {amount(len(pieces()), 'museum piece')} mended, {named} named"


# ---- the commands ----------------------------------------------------------------------------------------


def _list(folder: Folder) -> int:
    known = _known(folder)
    for piece in pieces():
        print(f"{piece.name:<10} {piece.title:<34} {_state(piece, folder, known.get(piece.name, {}))}")
    print(f"\n{museum_line(folder)}. To see a piece: python -m minisgl.lab break {pieces()[0].name}")
    return 0


def _show(piece: Piece, folder: Folder, options: argparse.Namespace) -> int:
    path, trace = folder.path / piece.file, folder.path / piece.trace
    print(f"{piece.title}: {piece.says}\n\n{_wrapped(piece.story)}")
    for source in piece.sources:
        print(f"  {source.name}: {source.url}")
    if path.exists():
        print(f"\nYour {path} runs, as it is now.")
    else:
        try:
            path.write_text(piece.faulty(), "utf-8")
        except OSError as error:
            raise ConfigError(f"{path} can't be written: {error.strerror}.") from error
        print(f"\nwrote {path}: the plugin with the fault")
        _remember(folder, piece, seen=True)
    found = _ask({"do": "show", "piece": piece.name, "file": str(path.resolve()), "trace": str(trace.resolve())})
    if "broken" in found:
        print(f"The plugin could not be run: {found['broken']}")
        return 1
    if piece.driver:
        print(
            f"It made {amount(found['calls'], 'call')}. What users saw: {found['symptom']}\nwrote {trace}: {piece.look}"
        )
        _print_next(piece, options, f"{shlex.quote(str(trace))}    lines of JSON; each {piece.noun} is a step")
        return 0
    uid, waited = found["longest"]
    print(
        f"It served {amount(found['requests'], 'request')} in {amount(found['steps'], 'step')}, "
        f"{found['answered']} got a final reply.\nWhat users saw: {found['symptom']}\n"
        f"The longest wait for a first token: request {uid}, {amount(waited, 'turn')} of the scheduler's loop.\n"
        f"wrote {trace}: every step of this run"
    )
    if found.get("last"):
        print("Its last request came when all others had ended: it needs every page of the pool.")
    look = f"python -m minisgl.trace {shlex.quote(str(trace))}"
    more = f"{look} --html look.html    the run, step by step"
    _print_next(piece, options, f"{look}    the summary, and the trace checker\n         {more}")
    return 0


def _print_next(piece: Piece, options: argparse.Namespace, look: str) -> None:
    where = "" if options.dir == "." else f" --dir {shlex.quote(options.dir)}"
    answer = "promise=N step=M" if piece.has_promise else "step=M"
    promises = (
        "The promises are listed in docs/architecture.md."
        if piece.has_promise
        else f"The step is the first {piece.noun} that goes wrong: the fault breaks none of the numbered promises."
    )
    print(
        f"\nLook:    {look}\n"
        f"Answer:  python -m minisgl.lab break {piece.name}{where} --answer {answer} method=NAME\n"
        f"Mend:    change {piece.file}, then: python -m minisgl.lab break {piece.name}{where} --grade\n"
        f"{promises} Must stay: {piece.counted}."
    )


def _answer(piece: Piece, folder: Folder, words: list[str]) -> int:
    values: dict[str, int] = {}
    method = None
    for word in words:
        name, _, value = word.partition("=")
        if name == "method" and value:
            method = value
        elif name in ("promise", "step") and value.isdecimal():
            values[name] = int(value)
        else:
            example = "--answer promise=3 step=12 method=TreeCache.lock"
            raise ConfigError(f"--answer {word}: expected promise=N, step=M and method=NAME, as in {example}")
    if not piece.has_promise:
        values.setdefault("promise", 0)
    if set(values) == {"step"}:
        raise ConfigError("--answer: this fault breaks one of the numbered promises: add promise=N to the answer")
    if len(values) < 2 or len(words) > len(values) + (method is not None):
        raise ConfigError("--answer: expected one promise=N, one step=M and one method=NAME")
    tries = _known(folder).get(piece.name, {}).get("tries", 0) + 1
    wrong = piece.judge(values["promise"], values["step"]) or piece.judge_method(method)
    if wrong is not None:
        _remember(folder, piece, tries=tries)
        print(f"{wrong} Answer {tries}.")
        return 1
    _remember(folder, piece, tries=tries, named=True)
    first = (
        f"promise {values['promise']}, first broken in"
        if piece.has_promise
        else f"the first {piece.noun} that goes wrong is"
    )
    print(f"Right, at answer {tries}: {first} step {values['step']}.\n")
    print(_wrapped(piece.explanation))
    return 0


def _grade(piece: Piece, folder: Folder, options: argparse.Namespace) -> int:
    path = Path(options.grade) if options.grade else folder.path / piece.file
    if not path.is_file():
        raise ConfigError(f"There is no {path}. Begin with: python -m minisgl.lab break {piece.name}")
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"{path}, sha256 {fingerprint(path)[:12]}, seed {seed}", flush=True)
    wrong = grade_mended(piece, path, seed)
    if wrong is not None:
        if wrong.startswith(("promise ", f"{piece.noun} ")) and not _known(folder).get(piece.name, {}).get("named"):
            wrong = "The workload of the piece still goes wrong: run it again, and look at its trace."
        print(f"Not mended. {wrong}")
        return 1
    _remember(folder, piece, path=str(path.resolve()), mended=fingerprint(path))
    runs = piece.nouns or "schedules"
    print(f"Mended: nothing went wrong on the workload of the piece and on random {runs}, and {piece.counted}.")
    return 0


def grade_mended(piece: Piece, path: Path, seed: int, **more: Any) -> str | None:
    """Return what is wrong with a mended file, or None. ``more`` are entries of the request, such as ``schedules``.

    The file and the piece's base run in a process each, on the same schedules, and their counts are compared.
    """
    request = {"do": "play", "piece": piece.name, "seed": seed, **more}
    mine = _ask({**request, "file": str(path.resolve()), "guarded": True})
    if "broken" in mine:
        return str(mine["broken"])
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / piece.file
        base.write_text(piece.mended(), "utf-8")
        right = _ask({**request, "file": str(base)})
    if "broken" in right:
        raise RuntimeError(f"the base of piece {piece.name} is not right: {right['broken']}")
    return compare(piece, mine, right)


def compare(piece: Piece, mine: dict[str, Any], right: dict[str, Any]) -> str | None:
    """Return what a file does less of than the piece's base, or None. The counts are those of `runs.play`."""
    random_ones = f"the random {piece.nouns or 'schedules'}"
    for where, text in (("own", "the workload of the piece"), ("random", random_ones)):
        for count, unit in UNITS.items():
            if count not in right[where]:
                continue
            most = right[where][count] * (1 + piece.slack) + 2
            if mine[where][count] > most:
                return (
                    f"Nothing went wrong, but on {text}, {mine[where][count]:,} {unit}; {right[where][count]:,} are "
                    f"enough. What must stay: {piece.counted}."
                )
    return None


def _ask(request: dict[str, Any]) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = ask_child("minisgl.chapters.lab.museum.runs", request, scaled_timeout(SECONDS))
    except ChildError as error:
        return {"broken": f"The process that ran it gave no result: {error}."}
    return answer


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH)
