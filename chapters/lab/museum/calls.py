"""Runs a part that no scheduler calls, such as a kernel: with the recorded calls of a piece, and with random ones.

A workload has ``calls``, a list of JSON values, and sizes that hold for all of them. The driver of the piece, a module
in ``drivers/``, knows what they mean. The trace has JSON lines: ``step`` is the number of the call, from 1.
"""

from __future__ import annotations

import importlib
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from minisgl.chapters.lab.grader.gate import Broken
from minisgl.chapters.lab.museum.pieces import Piece
from minisgl.plugin_manager.manager import PluginManager

__all__ = ["Driver", "Note", "driver_of", "load_plugins", "play_calls", "said", "show_calls"]

Note = Callable[..., None]
"""Writes a line of the trace: ``note(tensor="x", first=0)``."""


class Driver(Protocol):
    """A module in ``drivers/``."""

    SYMPTOM: str
    """What users saw of a call whose result is wrong."""

    def load(self, file: Path) -> Any:
        """Load a plugin file, and return what `start` needs of it."""

    def start(self, loaded: Any, workload: Mapping[str, Any]) -> Any:
        """Return a new part, before the first call of a workload."""

    def call(self, part: Any, call: Any, note: Note) -> Mapping[str, int]:
        """Make one call. Return what it counted (see ``UNITS`` in ``command.py``). Raise `Broken` if it went wrong."""

    def draw(self, rng: random.Random, number: int) -> Mapping[str, Any]:
        """Return a random workload. ``number``, from 1, grows."""


def load_plugins(file: Path) -> PluginManager:
    """Return a plugin manager with the plugins of a file: what most drivers' ``load`` does."""
    manager = PluginManager()
    manager.add(str(file))
    return manager


def driver_of(piece: Piece) -> Driver:
    """Return the driver of a piece."""
    return cast(Driver, importlib.import_module(f"minisgl.chapters.lab.museum.drivers.{piece.driver}"))


def show_calls(piece: Piece, file: Path, trace: Path) -> dict[str, Any]:
    """Make the piece's calls, and write the trace. Return what an operator sees. The first exception ends the run."""
    driver, lines, symptom, step = driver_of(piece), list[str](), "All results were right.", 0
    part = driver.start(driver.load(file), piece.workload)
    for step, call in enumerate(piece.workload["calls"], 1):

        def note(step: int = step, **entry: Any) -> None:
            lines.append(json.dumps({"step": step, **entry}))

        try:
            driver.call(part, call, note)
        except Broken:
            symptom = driver.SYMPTOM
        except Exception as error:  # the student's own
            symptom = f"The engine stopped in {piece.noun} {step}. {said(error)}"
            break
    trace.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return {"symptom": symptom, "calls": step}


def said(error: Exception) -> str:
    """Return the text of a failure in one line, with its type if it is no failed check."""
    kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{error}".split())[:400]


def _cause_of(piece: Piece, step: int) -> str | None:
    """Return the cause for which a call of the piece's workload goes wrong with the fault. None: it is right."""
    driver, cause = driver_of(piece), None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / piece.file
        file.write_text(piece.faulty(), "utf-8")
        part = driver.start(driver.load(file), piece.workload)
        for call in piece.workload["calls"][:step]:
            cause = None
            try:
                driver.call(part, call, lambda **entry: None)
            except Broken as broken:
                cause = broken.cause
    return cause


def play_calls(piece: Piece, file: Path, seed: int, numbers: Sequence[int]) -> dict[str, Any]:
    """Return what a plugin counts in the piece's calls and in random workloads, or what it breaks."""
    driver, counted = driver_of(piece), {"own": Counter[str](), "random": Counter[str]()}
    loaded = driver.load(file)
    drawn = [driver.draw(random.Random(f"{seed} {number}"), number) for number in numbers]
    for number, workload in enumerate([piece.workload, *drawn]):
        of = f"random workload {number} of seed {seed}" if number else "the workload of the piece"
        try:
            part = driver.start(loaded, workload)
        except Exception as error:  # the student's own
            return {"broken": f"Before the first {piece.noun} of {of}: {said(error)}"}
        for step, call in enumerate(workload["calls"], 1):
            where = f"In {piece.noun} {step} of {of}"
            if number and len(workload["calls"]) == 1:
                where = f"In random {piece.noun} {number} of seed {seed}"
            try:
                counted["random" if number else "own"].update(driver.call(part, call, lambda **entry: None))
            except Broken as broken:
                if number == 0:
                    before = _cause_of(piece, step)
                    where = piece.broken_in(step, before is not None, before in (None, broken.cause))
                return {"broken": f"{where}: {broken.promise} {broken.seen}"}
            except Exception as error:
                return {"broken": f"{where}: {said(error)}"}
    return {where: dict(counts) for where, counts in counted.items()}
