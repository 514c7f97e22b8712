"""Code that a page quotes from the source by symbol, so that it is always current. A missing symbol is an error.

    ```python quote="plugins/scheduler/mixed.py::MixedPolicy.plan"
    ```

Comments that mark a part of a lab (``# lab:``) are not shown. This module does not depend on mkdocs.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from minisgl.chapters.lab.catalog import labs
from minisgl.chapters.site import blocks

MAX_LINES = 40
"""Maximum number of lines of a quote, so that readers read it."""
WIDE = 92
"""Longest line of a quote, in columns, that is shown in the usual size. Longer lines get a smaller one."""
_MARKER = re.compile(r"^\s*# lab: ")


def spoiler(path: str) -> str:
    """Return the name of the lab whose reference solution ``path`` is, or an empty string. Pages do not link to it."""
    module = f"minisgl.{path.removesuffix('.py').replace('/', '.')}"
    return next((lab.lab for lab in labs() if lab.plugin == module), "")


class QuoteError(ValueError):
    """A quote names a missing file, symbol or line, is too long, or has wrong options."""


class Quote(NamedTuple):
    """A quoted part of a file. ``text`` is the text to show; ``first`` is its first line in the file, from 1."""

    path: str
    symbol: str
    first: int
    text: str


def find(root: Path, target: str, lines: str | None = None) -> Quote:
    """Return the quote of ``target``: ``path`` or ``path::symbol``. Raises `QuoteError`.

    A symbol is ``Class``, ``Class.method``, a function or a constant. ``lines`` (``"a-b"``) selects lines, counted from
    the first line of the symbol or of the file.
    """
    path, _, symbol = target.partition("::")
    file = root / path
    if not file.is_file():
        raise QuoteError(f"{target}: there is no file {path}")
    source = file.read_text(encoding="utf-8").splitlines()
    first, last = _span(file, symbol) if symbol else (1, len(source))
    if lines:
        start, _, end = lines.partition("-")
        if not 1 <= int(start) <= int(end) <= last - first + 1:
            raise QuoteError(f'{target}: it has {last - first + 1} lines, so lines="{lines}" is not possible')
        first, last = first + int(start) - 1, first + int(end) - 1
    shown = [line for line in source[first - 1 : last] if not _MARKER.match(line)]
    while shown and not shown[-1].strip():
        shown.pop()
    if len(shown) > MAX_LINES:
        raise QuoteError(f'{target}: {len(shown)} lines; at most {MAX_LINES} are allowed: select some with lines="a-b"')
    return Quote(path, symbol, first, textwrap.dedent("\n".join(shown)))


def _span(file: Path, symbol: str) -> tuple[int, int]:
    """Return the first and last line of a symbol, with its decorators. Raises `QuoteError`."""
    body: list[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
    node: ast.stmt | None = None
    for name in symbol.split("."):
        node = next((each for each in body if name in _names(each)), None)
        if node is None:
            known = ", ".join(sorted(n for each in body for n in _names(each)))
            raise QuoteError(f"{file.name}::{symbol}: there is no {name}; there are {known or 'no names'}")
        body = getattr(node, "body", [])
    assert node is not None
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)]), node.end_lineno or node.lineno


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.AnnAssign):
        return [node.target.id] if isinstance(node.target, ast.Name) else []
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def quoted_files(markdown: str) -> set[str]:
    """Return the paths of the files that a page quotes."""
    return {b.options["quote"].partition("::")[0] for b in blocks.blocks(markdown) if "quote" in b.options}


def expand(block: blocks.Block, root: Path, link: Callable[[Quote], str]) -> str:
    """Return a quoting block with the current code, followed by the HTML of ``link``.

    Return other blocks unchanged. Raises `QuoteError`.
    """
    if "quote" not in block.options:
        return block.raw
    unknown = block.options.keys() - {"quote", "lines"}
    if unknown:
        raise QuoteError(f"{block.options['quote']}: a quote accepts only lines=, not {', '.join(sorted(unknown))}")
    quote = find(root, block.options["quote"], block.options.get("lines"))
    wide = any(len(line) > WIDE for line in quote.text.splitlines())
    head = f"{{ .{block.language} .wide }}" if wide else block.language
    return textwrap.indent(f"```{head}\n{quote.text}\n```\n{link(quote)}", block.indent)
