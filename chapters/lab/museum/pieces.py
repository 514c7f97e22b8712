"""The description of a museum piece, its plugin with the fault, and the check of an answer."""

from __future__ import annotations

import ast
import functools
import importlib.resources
import random
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from minisgl.config import ConfigError
from minisgl.plugin_manager.discovery import near

__all__ = ["NAME", "Piece", "Source", "find_piece", "pieces"]

NAME = "museum"
"""The name of every piece's plugin in its group: ``cache=museum``."""


@dataclass(frozen=True)
class Source:
    """Where the fault is described in public: the project and the number of the thread, and its address."""

    name: str
    url: str


@dataclass(frozen=True)
class Piece:
    """One fault.

    - ``lab``: the lab after which a student can mend it.
    - ``group``: the plugin's group, such as ``cache``.
    - ``driver``: the module of ``drivers`` that calls a part which no scheduler calls. ``noun`` says what a call is,
      such as a launch, and ``look`` what the trace has. Empty for the groups ``cache`` and ``scheduler``.
    - ``base``: the module of ``bases`` without the fault.
    - ``says``: the piece in one line. ``story``: what users saw. ``explanation``: printed after a right answer.
    - ``changes``: (right lines, faulty lines), each once in the base.
    - ``answers``: promise → the first step of the piece's workload in which it is broken. The first promise is the one
      that the trace checker reports; another is a consequence that also counts as an answer. The promise 0 is none of
      the numbered ones: then an answer has no promise.
    - ``also``: functions in which the fault can be mended too, beside those that ``changes`` change.
    - ``keep``: classes and methods, such as ``Cache.match``, without which the file is not the piece any more.
    - ``blocked``: modules that a mended file may not import.
    - ``counted``: what a mended file must still do, in words. ``slack``: by which share it may compute more prompt
      tokens, or need more steps, than the base.
    - ``workload``: the sizes of the engine and the requests: see `minisgl.chapters.lab.museum.runs`, or `calls`.
    """

    name: str
    title: str
    says: str
    lab: str
    story: str
    sources: tuple[Source, ...]
    group: str
    base: str
    changes: tuple[tuple[str, str], ...]
    answers: Mapping[int, int]
    explanation: str
    counted: str
    keep: tuple[str, ...]
    workload: Mapping[str, Any]
    order: int = 0
    blocked: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    slack: float = 0.05
    driver: str = ""
    noun: str = ""
    look: str = ""

    @property
    def file(self) -> str:
        """The name of the file in the student's folder."""
        return f"museum_{self.name}.py"

    @property
    def trace(self) -> str:
        """The name of the trace in the student's folder."""
        return f"museum_{self.name}.jsonl"

    @property
    def forbidden(self) -> tuple[str, ...]:
        """The modules that a mended file may not import: the bases, and what replaces the whole plugin."""
        bases = "minisgl.chapters.lab.museum.bases"
        return ("minisgl.chapters.lab.museum", bases, f"{bases}.{self.base}", *self.blocked)

    @property
    def nouns(self) -> str:
        """Return the plural of ``noun``."""
        return f"{self.noun}es" if self.noun.endswith(("ch", "s")) else f"{self.noun}s" * bool(self.noun)

    @property
    def has_promise(self) -> bool:
        """Whether the fault breaks one of the numbered promises, which an answer then names."""
        return 0 not in self.answers

    def broken_in(self, step: int, before: bool = True, same: bool = True) -> str:
        """Return the beginning of a sentence: what is broken in a step of the piece's workload.

        ``before`` is whether this step also goes wrong with the fault, and ``same`` whether for the same cause.
        """
        if not before:
            return f"{self.noun} {step} now goes wrong"
        if not same or not self.has_promise:
            return f"{self.noun} {step} still goes wrong{'' if same else ', in another way'}"
        return f"promise {next(iter(self.answers))} is still broken in step {step}"

    def mended(self) -> str:
        """Return the text of the plugin without the fault."""
        base = importlib.resources.files("minisgl.chapters.lab.museum.bases") / f"{self.base}.py"
        return base.read_text("utf-8")

    def faulty(self) -> str:
        """Return the text of the plugin with the fault. Raise ValueError if the changes don't fit the base."""
        text = self.mended()
        for right, wrong in self.changes:
            if text.count(right) != 1:
                raise ValueError(f"piece {self.name}: {right!r} is {text.count(right)} times in {self.base}.py")
            text = text.replace(right, wrong)
        return f"# minisgl lab: break {self.name}\n{_shuffled(text, self.name)}"

    def places(self) -> set[str]:
        """Return the functions that have the fault, as ``Class.method`` or as ``function``."""
        text, found = self.mended(), set(self.also)
        for right, _ in self.changes:
            begin = text.index(right) + len(right) - len(right.lstrip("\n"))
            lines = range(text.count("\n", 0, begin) + 1, text.count("\n", 0, begin + len(right.strip("\n"))) + 2)
            for node in ast.parse(text).body:
                inner = node.body if isinstance(node, ast.ClassDef) else [node]
                owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
                found |= {
                    f"{owner}{each.name}"
                    for each in inner
                    if isinstance(each, ast.FunctionDef)
                    and each.lineno < lines.stop
                    and (each.end_lineno or 0) >= lines[0]
                }
        return found

    def judge_method(self, name: str | None) -> str | None:
        """Return what is wrong with the method of an answer whose promise and step are right, or None."""
        right = "Promise and step are right." if self.has_promise else "The step is right."
        if name is None:
            return f"{right} Which method must change? Add method=NAME to the answer."
        if name not in {form for place in self.places() for form in (place, place.rpartition(".")[2])}:
            return f"{right} But {name} does what it should."
        return None

    def judge(self, promise: int, step: int) -> str | None:
        """Return what is wrong with the promise or the step of an answer, without the right ones, or None."""
        if promise not in self.answers and self.has_promise:
            return f"Promise {promise} is not the one that this fault breaks first."
        if promise not in self.answers:
            return "This fault breaks none of the numbered promises: answer with step and method alone."
        if step != self.answers[promise]:
            where = "before" if step < self.answers[promise] else "after"
            if not self.has_promise:
                return f"Step {step} is {where} the first step that goes wrong."
            return f"Promise {promise} is right. But step {step} is {where} the first step in which it is broken."
        return None


def _shuffled(text: str, seed: str) -> str:
    """Return a module with the methods of each class in another order, `__init__` first.

    Pieces with the same base would otherwise differ only in their faults.
    """
    text = re.sub(r"    # ---- .*\n\n", "", text)  # headings of methods that are no longer together
    lines, rng = text.splitlines(keepends=True), random.Random(seed)
    for node in reversed(ast.parse(text).body):
        if not isinstance(node, ast.ClassDef):
            continue
        ends = [each.end_lineno or 0 for each in node.body]
        first = next((i for i, each in enumerate(node.body) if isinstance(each, ast.FunctionDef)), len(ends))
        if first in (0, len(ends)) or not all(isinstance(each, ast.FunctionDef) for each in node.body[first:]):
            continue
        parts = [lines[begin:end] for begin, end in pairwise(ends[first - 1 :])]
        names = [each.name for each in node.body[first:] if isinstance(each, ast.FunctionDef)]
        places = {name: (name != "__init__", rng.random()) for name in names}
        order = sorted(range(len(names)), key=lambda i: places[names[i]])
        lines[ends[first - 1] : ends[-1]] = [line for i in order for line in parts[i]]
    return "".join(lines)


@functools.cache
def _by_name() -> dict[str, Piece]:
    folder = importlib.resources.files("minisgl.chapters.lab.museum") / "pieces"
    found = [_read(file.name.removesuffix(".toml"), tomllib.loads(file.read_text("utf-8"))) for file in folder.iterdir()
             if file.name.endswith(".toml")]  # fmt: skip
    return {piece.name: piece for piece in sorted(found, key=lambda piece: (piece.order, piece.name))}


def _read(name: str, values: dict[str, Any]) -> Piece:
    values["sources"] = tuple(Source(**each) for each in values["sources"])
    values["changes"] = tuple((each["right"], each["faulty"]) for each in values.pop("change"))
    values["answers"] = {each.get("promise", 0): each["step"] for each in values.pop("answer")}
    for key in ("story", "explanation"):
        values[key] = " ".join(values[key].split())
    for key in ("keep", "blocked", "also"):
        values[key] = tuple(values.get(key, ()))
    return Piece(name, **values)


def pieces() -> list[Piece]:
    """Return every piece, in the order in which students meet them."""
    return list(_by_name().values())


def find_piece(name: str) -> Piece:
    """Return the piece ``name``. Raise `ConfigError`, with the known names, if there is none."""
    known = _by_name()
    if name not in known:
        raise ConfigError(f"The museum has no piece {name!r}{near(name, known)} Pieces: {', '.join(known)}.")
    return known[name]
