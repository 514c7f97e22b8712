"""Finds the submissions in a folder, and compares a submission with the shipped plugin.

The folder holds lab files by the names of the catalog (``my_policy.py``, the folder ``my_capstone``), or one folder of
them for each student, or both. The files of the top folder belong to the student whose name is the folder's.
"""

from __future__ import annotations

import difflib
import io
import keyword
import os
import tokenize
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minisgl.chapters.lab.catalog import Lab, labs
from minisgl.chapters.lab.skeletons import skeleton, solution
from minisgl.config import ConfigError

__all__ = ["Submission", "similarity", "submissions"]


MOST_COMPARED_BYTES = 256 * 2**10
"""The largest file whose similarity is computed."""


@dataclass(frozen=True)
class Submission:
    """One student's file, or folder, for one lab."""

    student: str
    lab: Lab
    path: Path


def submissions(folder: Path, only: Sequence[str] = ()) -> list[Submission]:
    """Return the submissions in a folder, by student and in the order of the course. ``only``: the labs to grade.

    A link counts as a submission too: it is refused when its turn comes. Raise `ConfigError` if there is no such
    folder, or no submission in it.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder.")
    folder = folder.resolve()
    wanted = [lab for lab in labs() if not only or lab.lab in only]
    names = {lab.file for lab in labs()}
    inner = [f for f in sorted(folder.iterdir()) if f.is_dir() and f.name not in names and not f.name.startswith(".")]
    found = []
    for place in [folder, *inner]:
        there = [lab for lab in wanted if os.path.lexists(place / lab.file)]
        found += [Submission(place.name, lab, place / lab.file) for lab in there]
    if not found:
        files = ", ".join(lab.file for lab in wanted)
        raise ConfigError(f"{folder}: no submission was found, neither here nor in its folders. The names are {files}.")
    return found


# ---- similarity --------------------------------------------------------------------------------------------


def similarity(lab: Lab, path: Path) -> float | None:
    """Return how similar the written parts of a file are to the shipped plugin's: 0 to 1, for a person to look at.

    Both are compared as sequences of tokens in which all names are equal, without comments, docstrings and the lines of
    the skeleton. A short lab has few ways to be written, so a high number proves nothing. None: there is nothing to
    compare, or the file is larger than `MOST_COMPARED_BYTES`.
    """
    if not lab.plugin or not path.is_file() or path.stat().st_size > MOST_COMPARED_BYTES:
        return None
    try:
        given = Counter(map(tuple, _lines(skeleton(lab))))
        mine, shipped = _written(path.read_text("utf-8"), given), _written(solution(lab), given)
    except (OSError, ValueError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError):
        return None
    if not mine or not shipped:
        return None
    return round(difflib.SequenceMatcher(None, mine[:5000], shipped, autojunk=False).ratio(), 3)


def _written(text: str, given: Counter[tuple[str, ...]]) -> list[str]:
    """Return the tokens of the lines that are not in the skeleton."""
    left, found = given.copy(), []
    for line in _lines(text):
        if left[tuple(line)] > 0:
            left[tuple(line)] -= 1
        else:
            found += line
    return found


def _lines(text: str) -> list[list[str]]:
    """Return the tokens of each logical line: names that are no keywords as ``name``, numbers and strings as kinds."""
    lines: list[list[str]] = [[]]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NEWLINE:
            lines.append([])
        elif token.type == tokenize.NAME:
            lines[-1].append(token.string if keyword.iskeyword(token.string) else "name")
        elif token.type in (tokenize.NUMBER, tokenize.STRING):
            lines[-1].append(tokenize.tok_name[token.type])
        elif token.type == tokenize.OP:
            lines[-1].append(token.string)
    return [line for line in lines if line and line != ["STRING"]]
