"""The output of a page's code, committed in the page, so that the page reads the same on GitHub and on the site.

    ```python exec="on" source="above" result="text"
    print(6 * 7)
    ```

    <!-- output -->
    ```text
    42
    ```
    <!-- /output -->

A block whose code is not shown is inside a comment; so is a check. A quoting block contains the quoted code, and its
output is a link to the file. ``python -m minisgl.chapters.site.render`` writes all outputs; the site's build shows them
and runs nothing. A block without output is left to the build. This module does not depend on mkdocs.
"""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Callable
from typing import NamedTuple

from minisgl.chapters.site.blocks import Block, blocks, map_text
from minisgl.trace.draw.svg import figure

BEGIN, END = "<!-- output -->", "<!-- /output -->"
LIVE = "*This figure is interactive. It is part of the site, which `make docs` builds.*"
"""Output of a block that prints a figure with a script, which GitHub does not show."""

_UNIT = re.compile(
    r"^(?P<open>[ ]*<!--\n)?"
    r"(?P<block>(?P<indent>[ ]*)(?P<ticks>```+)[^\n`]*\n.*?^(?P=indent)(?P=ticks)[ ]*$)"
    r"(?(open)\n[ ]*-->[ ]*$)"
    rf"(?P<output>\n+[ ]*{re.escape(BEGIN)}\n(?P<inside>.*?)^[ ]*{re.escape(END)}[ ]*$)?",
    re.MULTILINE | re.DOTALL,
)
_PICTURE = re.compile(r"^!\[[^\n]*\]\((?P<path>[^)\s]+\.svg)\)$", re.MULTILINE)
_FILE = re.compile(r"^!\[(?:[^\]]+)\]\((?P<path>[\w./-]+\.svg)\)$", re.MULTILINE)
"""A picture file in a paragraph of its own, whose description may have several lines."""
_DETAILS = re.compile(
    r'^<details(?: class="(?P<kind>\w+)")?>\n<summary>(?P<title>[^\n]*)</summary>\n(?P<body>.*?)^</details>$',
    re.MULTILINE | re.DOTALL,
)


class Unit(NamedTuple):
    """One block with its output. ``hidden`` is true inside a comment; ``output`` is None if the page has none."""

    block: Block
    hidden: bool
    output: str | None


def _unit(match: re.Match[str]) -> Unit:
    block = blocks(match["block"])[0]
    line = match.string.count("\n", 0, match.start("block")) + 1
    inside = None if match["output"] is None else textwrap.dedent(match["inside"]).strip("\n")
    return Unit(block._replace(line=line), bool(match["open"]), inside)


def units(markdown: str) -> list[Unit]:
    """Return the blocks of a page with their outputs, in order."""
    return [_unit(match) for match in _UNIT.finditer(markdown)]


def map_units(markdown: str, function: Callable[[Unit], str]) -> str:
    """Return the page with each block, its comment and its output replaced by the result of ``function``."""
    return _UNIT.sub(lambda match: function(_unit(match)), markdown)


def write(unit: Unit) -> str:
    """Return the Markdown of a unit."""
    raw = unit.block.raw
    if unit.hidden:
        if "-->" in raw:
            raise ValueError(f"line {unit.block.line}: code inside a comment must not contain '-->'")
        raw = f"{unit.block.indent}<!--\n{raw}\n{unit.block.indent}-->"
    if unit.output is None:
        return raw
    region = textwrap.indent(f"{BEGIN}\n{unit.output}\n{END}", unit.block.indent)
    return f"{raw}\n\n{region}"


def fence(text: str, language: str = "text") -> str:
    """Return ``text`` as a fenced block, without blank lines at its ends."""
    body = "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", body)), default=0))
    return f"{ticks}{language}\n{body}\n{ticks}"


def for_site(markdown: str) -> tuple[str, dict[str, list[str]]]:
    """Return the page as the site's build takes it, and its pictures: the id of a placeholder -> paths of SVG files.

    Checks and comments around blocks are removed; a block with output becomes its code, if shown, and the output.
    """
    pictures: dict[str, list[str]] = {}

    def show(unit: Unit) -> str:
        block = unit.block
        if "check" in block.options:
            return ""
        if "quote" in block.options or unit.output is None or unit.output == LIVE or "exec" not in block.options:
            return block.raw
        parts = []
        if source := block.options.get("source"):
            console = source == "console"
            code = "\n".join(f"$ {line}" for line in block.code.splitlines()) if console else block.code.strip("\n")
            parts.append(fence(code, "console" if console else block.language))
        if found := [match["path"] for match in _PICTURE.finditer(unit.output)]:
            mark = f"picture-{len(pictures)}"
            pictures[mark] = found
            parts.append(f'<div id="{mark}"></div>')
        else:
            parts.append(re.sub(r"\A(```+)(\w+)$", r"\1{ .\2 .result }", unit.output, count=1, flags=re.MULTILINE))
        return textwrap.indent("\n\n".join(parts), block.indent)

    def fold(match: re.Match[str]) -> str:
        body = textwrap.indent(match["body"].strip("\n"), "    ")
        title = html.unescape(match["title"]).replace('"', "&quot;")
        return f'??? {match["kind"] or "question"} "{title}"\n\n{body}\n'

    def place(match: re.Match[str]) -> str:
        mark = f"picture-{len(pictures)}"
        pictures[mark] = [match["path"]]
        return f'<div id="{mark}"></div>'

    shown = map_text(map_units(markdown, show), lambda text: _FILE.sub(place, text))
    return _DETAILS.sub(fold, shown), pictures


def narrow_name(path: str) -> str:
    """Return the name of the file with the version of a picture for narrow screens."""
    return path.removesuffix(".svg") + "-narrow.svg"


def inline(page: str, mark: str, pictures: list[str]) -> str:
    """Return an HTML page with a placeholder replaced by SVG pictures, so that they follow the page's colours.

    A picture with a width of its own gets a figure, in which it scrolls on a narrow screen. Several pictures that fit
    any width are side by side, or below each other on a narrow screen.
    """
    if all(' width="' in picture.partition(">")[0] for picture in pictures):
        shown = "".join(map(_figure, pictures))
    else:
        shown = f'<div style="display: flex; flex-wrap: wrap; gap: 0.5rem 1.5rem">{"".join(pictures)}</div>'
    return page.replace(f'<div id="{mark}"></div>', shown)


def _figure(picture: str) -> str:
    if "min-width:" in picture.partition(">")[0]:  # it was printed with its figure
        return f'<figure class="mg-figure" style="overflow-x:auto;margin:1em 0">{picture}</figure>'
    return figure(picture)
