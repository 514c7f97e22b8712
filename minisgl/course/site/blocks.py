"""The fenced code blocks of a Markdown page, for whoever runs or fills them: the site's build and the tests.

    ```bash skip="it serves until Ctrl-C"

is a block that nobody runs, and says why: on the page, and in the tests' report. A block inside a longer fence is an
example of one, and left alone.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from typing import NamedTuple

_FENCE = re.compile(
    r"^(?P<indent>[ ]*)(?P<ticks>```+)(?P<head>[^\n`]*)\n(?P<code>.*?)^(?P=indent)(?P=ticks)[ ]*$",
    re.MULTILINE | re.DOTALL,
)
_OPTION = re.compile(r'(\w+)="([^"]*)"')


class Block(NamedTuple):
    """One block: its language, the options after it, its code, the line of the page where it begins, its indent, and
    all of it as it stands in the page."""

    language: str
    options: dict[str, str]
    code: str
    line: int
    indent: str
    raw: str


def _block(match: re.Match[str]) -> Block:
    language = match["head"].strip().partition(" ")[0]
    line = match.string.count("\n", 0, match.start()) + 1
    options = dict(_OPTION.findall(match["head"]))
    return Block(language, options, textwrap.dedent(match["code"]), line, match["indent"], match[0])


def blocks(markdown: str) -> list[Block]:
    """All fenced blocks of a page, in order."""
    return [_block(match) for match in _FENCE.finditer(markdown)]


def map_blocks(markdown: str, function: Callable[[Block], str]) -> str:
    """The page with each block replaced by what ``function`` makes of it."""
    return _FENCE.sub(lambda match: function(_block(match)), markdown)


def map_text(markdown: str, function: Callable[[str], str]) -> str:
    """The page with ``function`` applied to what stands between the blocks."""
    parts, end = [], 0
    for match in _FENCE.finditer(markdown):
        parts += [function(markdown[end : match.start()]), match[0]]
        end = match.end()
    return "".join([*parts, function(markdown[end:])])


def without_blocks(markdown: str) -> str:
    return _FENCE.sub("", markdown)


def prose(markdown: str) -> str:
    """A page without its front matter, code, comments and HTML tags: what a reader reads. Link texts stay, addresses
    go."""
    text = re.sub(r"\A---\n.*?^---\n", "", markdown, flags=re.DOTALL | re.MULTILINE)
    text = without_blocks(text)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"(`+).+?\1", "", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"<[^>\n]*>", "", text)
    return re.sub(r"\{[^}\n]*\}", "", text)


def plain_pipes(text: str) -> str:
    """Code in a table whose pipes are escaped, as other readers of Markdown need it, but Python's shows literally."""
    return re.sub(r"`[^`\n]+`", lambda match: match[0].replace("\\|", "|"), text)


def say_what_is_skipped(block: Block) -> str:
    """A block with ``skip="reason"``, followed by a line in which the reader sees the reason; another as it is."""
    if "skip" not in block.options:
        return block.raw
    head, rest = block.raw.split("\n", 1)
    reason = f'<p class="quoted">not run by the tests: {block.options["skip"]}</p>'
    return f"{_OPTION.sub('', head).rstrip()}\n{rest}\n\n{block.indent}{reason}\n"
