"""From a shipped plugin to the skeleton that a student starts with.

The code between ``# lab:`` markers is replaced by a TODO:

    # lab: policy.plan          a part begins: whole functions, or statements inside a function
    # 1. Running first: …       numbered comments stay in the skeleton as a guide
    # lab: end

    # lab: omit                 left out of the skeleton and of the solution: a student does not need it
    # lab: end

Signatures, docstrings and numbered comments stay. Names are renamed token by token, never inside comments or
docstrings. Knows Python's syntax and a lab's description. Tests check that each skeleton can be solved.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import io
import re
import textwrap
import tokenize
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from minisgl.chapters.lab.catalog import Lab
from minisgl.utils.version import __version__

_BEGIN = re.compile(r"\s*# lab: (?!(?:end|omit)$)(\S+)$")
_OMIT = re.compile(r"\s*# lab: omit$")
_END = re.compile(r"\s*# lab: end$")
_NUMBERED = re.compile(r"\s*# \d+\. ")
_COMMENT = re.compile(r"\s*#")
HEADER = re.compile(r"^# minisgl lab (\S+), skeleton (\w+)(?: \(minisgl ([\w.]+)\))?", re.MULTILINE)
"""The header line of a student's file: the lab, a digest of its skeleton, and the version of minisgl that wrote it."""


@dataclass(frozen=True)
class Region:
    """The lines between two markers: ``first`` to ``last``, counted from 1, without the markers' own lines."""

    part: str
    first: int
    last: int


def source(lab: Lab) -> str:
    """Return the source of the lab's reference, without its omitted regions."""
    spec = importlib.util.find_spec(lab.plugin or "")
    assert spec is not None, f"lab {lab.lab}: there is no module {lab.plugin}"
    assert spec.origin is not None
    return without_omitted(Path(spec.origin).read_text("utf-8"))


def without_omitted(text: str) -> str:
    """Return ``text`` without the regions between ``# lab: omit`` and ``# lab: end``.

    Raise ValueError if a region has no end or contains another marker.
    """
    kept: list[str] = []
    since: int | None = None
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if since is None and _OMIT.match(line):
            since = number
        elif since is None:
            kept.append(line)
        elif _END.match(line):
            since = None
        elif _BEGIN.match(line) or _OMIT.match(line):
            raise ValueError(f"line {number}: a `# lab:` marker inside the `# lab: omit` of line {since}")
    if since is not None:
        raise ValueError(f"line {since}: `# lab: omit` has no `# lab: end`")
    return "".join(kept)


def regions(text: str) -> list[Region]:
    """Return the marked regions, in order. Raise ValueError if a marker has no partner."""
    found: list[Region] = []
    open_at: tuple[str, int] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if begins := _BEGIN.match(line):
            if open_at:
                raise ValueError(f"line {number}: part {begins[1]} begins inside {open_at[0]}")
            open_at = begins[1], number + 1
        elif _END.match(line):
            if not open_at:
                raise ValueError(f"line {number}: `# lab: end` without a part that began")
            found.append(Region(open_at[0], open_at[1], number - 1))
            open_at = None
    if open_at:
        raise ValueError(f"part {open_at[0]} has no `# lab: end`")
    return found


def skeleton(lab: Lab, solved: Collection[str] = ()) -> str:
    """Return the file that ``start`` writes. The parts named in ``solved`` keep the reference's code."""
    text = source(lab)
    body = _cut(text, [region for region in regions(text) if region.part not in solved])
    lines = [line for line in body.splitlines() if not (_BEGIN.match(line) or _END.match(line))]
    body = _rename(_tidy(lines), lab)
    return _head(lab, text) + _without_docstring(body)


def solution(lab: Lab) -> str:
    """Return the reference as a student's file: the skeleton with every part solved."""
    return skeleton(lab, [part.name for part in lab.parts])


def version(lab: Lab) -> str:
    """Return a digest of everything that the skeleton is generated from."""
    return _digest(lab, source(lab))


def started_with(text: str) -> str | None:
    """Return the version of minisgl that wrote the skeleton of a lab file, from the file's header line."""
    header = HEADER.search(text)
    return header[3] if header else None


def _digest(lab: Lab, text: str) -> str:
    inputs = repr((text, lab.renames, lab.choice, lab.name, lab.title))
    return hashlib.sha256(inputs.encode()).hexdigest()[:10]


def _head(lab: Lab, text: str) -> str:
    return (
        f'"""Lab {lab.lab}: {lab.title}.\n\n'
        f"Grade it:  python -m minisgl.lab test {lab.lab}     (`hint {lab.lab}` for a hint)\n"
        f'Serve it:  {lab.command}\n"""\n\n'
        f"# minisgl lab {lab.lab}, skeleton {_digest(lab, text)} (minisgl {__version__})\n"
    )


def _without_docstring(body: str) -> str:
    first = ast.parse(body).body[0]
    assert isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant), "the plugin has no docstring"
    return "\n".join(body.splitlines()[first.end_lineno or 0 :]) + "\n"


# ---- cutting parts out -------------------------------------------------------------------------------


def _cut(text: str, cuts: Sequence[Region]) -> str:
    lines = text.splitlines()
    tree = ast.parse(text)
    for region in reversed(cuts):
        nodes = list(_inside(tree, region))
        if not nodes:
            raise ValueError(f"part {region.part} holds no statement")
        if all(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes):
            for node in reversed(nodes):
                _cut_function(lines, node, region.part)  # type: ignore[arg-type]
        else:
            indent = " " * nodes[0].col_offset
            lines[region.first - 1 : region.last] = _todo(lines[region.first - 1 : region.last], region.part, indent)
    return "\n".join(lines) + "\n"


def _inside(node: ast.AST, region: Region) -> Iterator[ast.stmt]:
    """Yield the outermost statements of a region. A class in the region yields its own statements instead."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            first = min([child.lineno, *(d.lineno for d in getattr(child, "decorator_list", ()))])
            if region.first <= first and (child.end_lineno or 0) <= region.last:
                if isinstance(child, ast.ClassDef):
                    yield from _inside(child, region)
                else:
                    yield child
                continue
        yield from _inside(child, region)


def _cut_function(lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef, part: str) -> None:
    body = node.body
    documented = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    if documented and len(body) == 1:
        return  # the body is a docstring only
    indent = " " * body[0].col_offset
    # Comments may stand between the signature and the first statement; they belong to the body.
    first = (body[0].end_lineno or 0) if documented else _signature_end(lines, node)
    last = node.end_lineno or 0
    lines[first:last] = _todo(lines[first:last], part, indent)


def _signature_end(lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of the signature's last line. Comments after it belong to the body."""
    last = node.body[0].lineno - 1
    while _COMMENT.match(lines[last - 1]) or not lines[last - 1].strip():
        last -= 1
    return last


def _todo(lines: Sequence[str], part: str, indent: str) -> list[str]:
    """Return the TODO line, the numbered comments of ``lines``, and ``raise NotImplementedError``."""
    kept: list[str] = []
    inside = False
    for line in lines:
        inside = bool(_NUMBERED.match(line)) or (inside and bool(_COMMENT.match(line)))
        if inside:
            kept.append(indent + line.strip())
    return [f"{indent}# TODO {part}", *kept, f"{indent}raise NotImplementedError"]


def _tidy(lines: Sequence[str]) -> str:
    """Join the lines with at most one blank line inside a block, two between blocks, and none at a block's start."""
    tidy: list[str] = []
    blank = 0
    for line in lines:
        if not line.strip():
            blank += 1
            continue
        opens = bool(tidy) and tidy[-1].rstrip().endswith((":", "(", "[", "{")) and line.startswith(" ")
        allowed = 0 if opens else 2 if not line.startswith(" ") else 1
        tidy += [""] * min(blank, allowed) + [line]
        blank = 0
    return "\n".join(tidy) + "\n"


# ---- names ---------------------------------------------------------------------------------------------


def _rename(text: str, lab: Lab) -> str:
    """Apply the lab's renames to name tokens, and replace string tokens that are exactly the plugin's name."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr):
            for name in ast.walk(node):
                if isinstance(name, ast.Name) and name.id in lab.renames:
                    raise ValueError(f"line {node.lineno}: {name.id} is in an f-string, where it can't be renamed")
    lines = text.splitlines(keepends=True)
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(text).readline))):
        new = None
        if token.type == tokenize.NAME:
            new = lab.renames.get(token.string)
        elif token.type == tokenize.STRING and lab.choice and token.string == f'"{lab.choice}"':
            new = f'"{lab.name}"'
        if new is not None:
            (row, start), (_, end) = token.start, token.end
            line = lines[row - 1]
            lines[row - 1] = line[:start] + new + line[end:]
    return textwrap.dedent("".join(lines))
