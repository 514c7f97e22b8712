"""``python -m minisgl.chapters.site.render``: runs the code of the pages and writes its output into them.

With ``--check`` it writes nothing, and ends with status 1 if a page differs; without names, it takes all pages.
Times, and what a block's option ``varies`` (a regular expression) matches, are not compared.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import textwrap
from collections.abc import Sequence
from html import escape, unescape
from pathlib import Path

from minisgl.chapters.site import quotes, rendered, times
from minisgl.chapters.site.__main__ import course
from minisgl.chapters.site.blocks import Block
from minisgl.chapters.site.rendered import Unit
from minisgl.chapters.site.run import ROOT, PageError, PageRunner, prepare

COURSE = ROOT / "docs" / "course.md"
UNITS = "µs|ms|s|seconds?|tok/s"
TIMES = rf"(?:(?<=\s)-)?\d[\d,.]*(?= ?(?:{UNITS})\b)|\d\.\d+e-\d+"
"""What is never compared: a number before a unit of time, and a rounding error such as 2.4e-07."""
_SVG = re.compile(r"<svg\b.*?</svg>", re.DOTALL)
_LABELS = (r'\baria-label="([^"]*)"', r"<desc[^>]*>(.*?)</desc>", r"<title[^>]*>(.*?)</title>")


def mask(text: str, varies: str = "") -> str:
    """Return ``text`` with all that may differ between two runs replaced by ``#``, and single spaces.

    A line may be broken before or after a longer time, on a slow machine: such a break counts as a space.
    """
    text = re.sub(rf"(?<=\d)\n(?=(?:{UNITS})\b)", " ", text)
    for pattern in (TIMES, varies):
        text = re.sub(pattern, "#", text) if pattern else text
    return re.sub(r"[ ]+", " ", re.sub(r"\n(?=#)", " ", text))


class Renderer:
    """Renders one page. ``pictures`` are the SVG files that belong to it: path -> contents."""

    def __init__(self, page: Path) -> None:
        self.page = page
        self.markdown = page.read_text(encoding="utf-8")
        self.pictures: dict[Path, str] = {}
        self._runner = PageRunner(page.relative_to(ROOT).as_posix(), self.markdown)

    def render(self, run: bool = True) -> str:
        """Return the page with current outputs. ``run=False`` renders the quotes only. Raises `PageError`."""

        def each(unit: Unit) -> str:
            options = unit.block.options
            if "quote" in options:
                return rendered.write(self._quote(unit))
            if run and "check" in options:
                self._runner.run(unit.block)
                return rendered.write(unit._replace(hidden=True, output=None))
            if run and "exec" in options:
                return rendered.write(self._execute(unit))
            return rendered.write(unit)

        return self._times(rendered.map_units(self.markdown, each))

    def _times(self, markdown: str) -> str:
        """Return a page of the course with its times; return other pages unchanged."""
        if self.page.is_relative_to(ROOT / "chapters"):
            return times.head(markdown)
        return times.course_table(markdown, self.page.parent) if self.page == COURSE else markdown

    def _quote(self, unit: Unit) -> Unit:
        options = unit.block.options
        try:
            quote = quotes.find(ROOT, options["quote"], options.get("lines"))
        except quotes.QuoteError as error:
            raise PageError(f"{self.page.relative_to(ROOT)}, line {unit.block.line}: {error}") from error
        head = unit.block.raw.partition("\n")[0].strip()
        raw = textwrap.indent(f"{head}\n{quote.text}\n```", unit.block.indent)
        up = "/".join([".."] * len(self.page.relative_to(ROOT).parent.parts))
        name = f"`{quote.symbol}` in {quote.path}" if quote.symbol else quote.path
        if lab := quotes.spoiler(quote.path):
            output = f"{name}, which solves the lab `{lab}`"
            return unit._replace(block=unit.block._replace(raw=raw), output=output)
        return unit._replace(block=unit.block._replace(raw=raw), output=f"[{name}]({up}/{quote.path})")

    def _execute(self, unit: Unit) -> Unit:
        options = unit.block.options
        printed = self._runner.run(unit.block)
        if "html" in options:
            output = self._draw(unit.block, printed)
        elif "result" in options:
            output = rendered.fence(printed, options["result"])
        else:
            output = printed.strip("\n")
        varies = options.get("varies", "")
        if unit.output is not None and mask(output, varies) == mask(unit.output, varies):
            output = unit.output
        if "result" in options:  # checks see what readers see: a busy machine changes no committed time
            self._runner.printed = "\n".join(output.splitlines()[1:-1])
        return unit._replace(hidden="source" not in options, output=output)

    def _draw(self, block: Block, printed: str) -> str:
        """Keep the SVG pictures that a block printed, and return the Markdown that shows them."""
        if "<script" in printed or "<iframe" in printed:
            return rendered.LIVE
        svgs = _SVG.findall(printed)
        if not svgs:
            raise PageError(f"{self._runner.name}, line {block.line}: the block printed no picture")
        name = block.options.get("picture") or block.options["session"]
        shown = []
        wide = sum(not _is_narrow(svg) for svg in svgs)
        number = 0
        for svg in svgs:
            number += not _is_narrow(svg)
            file = f"{name}{f'-{number}' if wide > 1 else ''}.svg"
            path = self.page.parent / "pictures" / (rendered.narrow_name(file) if _is_narrow(svg) else file)
            if path in self.pictures:
                raise PageError(f"{self._runner.name}, line {block.line}: two pictures are called {path.name}")
            self.pictures[path] = standalone(svg)
            if not _is_narrow(svg):
                shown.append(f"![{label(svg)}]({path.relative_to(self.page.parent).as_posix()})")
        return "\n".join(shown)


def _is_narrow(svg: str) -> bool:
    """Return whether a picture is the version of the picture before it for narrow screens."""
    return "mg-narrow" in svg.partition(">")[0]


def standalone(svg: str) -> str:
    """Return an SVG element as the contents of a file."""
    if "xmlns=" not in svg.partition(">")[0]:
        svg = svg.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    return svg + "\n"


def label(svg: str) -> str:
    """Return the description of a picture for a Markdown image."""
    found = next((match for pattern in _LABELS if (match := re.search(pattern, svg, re.DOTALL))), None)
    text = " ".join(unescape(found[1]).split()) if found else ""
    return escape(text, quote=False).replace("[", "(").replace("]", ")")


def pages_to_render() -> list[Path]:
    """Return the pages with committed parts: the chapters, their table, and pages of docs/ that quote or run code."""
    found = [ROOT / name for name, _ in course(ROOT)]
    for page in sorted((ROOT / "docs").glob("**/*.md")):
        options = [unit.block.options.keys() for unit in rendered.units(page.read_text(encoding="utf-8"))]
        if any({"quote", "exec"} & each for each in options) or page == COURSE:
            found.append(page)
    return found


def differences(renderer: Renderer, new: str) -> str:
    """Return the differences between the committed page with its pictures and the rendered ones, or ``""``."""
    name = renderer.page.relative_to(ROOT).as_posix()
    old = renderer.markdown.splitlines(keepends=True)
    found = "".join(difflib.unified_diff(old, new.splitlines(keepends=True), name, f"{name}, rendered"))
    for path, svg in renderer.pictures.items():
        if not path.exists() or path.read_text(encoding="utf-8") != svg:
            found += f"{path.relative_to(ROOT)} is out of date\n"
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Render pages, or check them; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m minisgl.chapters.site.render", description=main.__doc__)
    parser.add_argument("pages", nargs="*", type=Path, help="Markdown files; without any, all pages")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page differs")
    parser.add_argument("--quotes", action="store_true", help="render only quoted code, without running any code")
    args = parser.parse_args(argv)
    pages = [page.resolve() for page in args.pages] or pages_to_render()
    prepare()
    failed = False
    for page in pages:
        print(f"{page.relative_to(ROOT)} …", file=sys.stderr, flush=True)
        renderer = Renderer(page)
        try:
            new = renderer.render(run=not args.quotes)
        except PageError as error:
            print(error, file=sys.stderr)
            failed = True
            continue
        if args.check:
            found = differences(renderer, new)
            print(found, end="")
            failed |= bool(found)
            continue
        for path, svg in renderer.pictures.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(svg, encoding="utf-8")
        page.write_text(new, encoding="utf-8")
    if failed and args.check:
        print("Run `make pages` and commit the result.", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
