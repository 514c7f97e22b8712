"""Finds the fenced code blocks of a Markdown page. The site's build fills them in, and the tests run them.

    ```bash skip="it serves until Ctrl-C"

marks a block that is not run. The reason is in the page's source and in the tests' report, not on the site. A block
inside a longer fence is an example of a block, and is ignored.
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
    """One block.

    ``options`` are those after the language. ``line`` is the line of the page where the block begins, from 1. ``raw``
    is the complete text of the block with its fences.
    """

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
    """Return all fenced blocks of a page, in order."""
    return [_block(match) for match in _FENCE.finditer(markdown)]


def map_blocks(markdown: str, function: Callable[[Block], str]) -> str:
    """Return the page with each block replaced by the result of ``function``."""
    return _FENCE.sub(lambda match: function(_block(match)), markdown)


def map_text(markdown: str, function: Callable[[str], str]) -> str:
    """Return the page with ``function`` applied to the text between the blocks."""
    parts, end = [], 0
    for match in _FENCE.finditer(markdown):
        parts += [function(markdown[end : match.start()]), match[0]]
        end = match.end()
    return "".join([*parts, function(markdown[end:])])


def without_blocks(markdown: str) -> str:
    """Return the page without its fenced blocks."""
    return _FENCE.sub("", markdown)


def prose(markdown: str) -> str:
    """Return the prose of a page: without front matter, code and its output, comments, HTML tags and addresses."""
    text = re.sub(r"\A---\n.*?^---\n", "", markdown, flags=re.DOTALL | re.MULTILINE)
    text = without_blocks(text)
    text = re.sub(r"<!-- output -->.*?<!-- /output -->", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"(`+).+?\1", "", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"<[^>\n]*>", "", text)
    return re.sub(r"\{[^}\n]*\}", "", text)


def plain_pipes(text: str) -> str:
    """Return ``text`` without the backslashes before pipes in code.

    Other Markdown renderers need these backslashes in tables, but Python's shows them.
    """
    return re.sub(r"`[^`\n]+`", lambda match: match[0].replace("\\|", "|"), text)


def hide_skip_reason(block: Block) -> str:
    """Return a block without ``skip="reason"``, which is for the tests; return other blocks unchanged."""
    if "skip" not in block.options:
        return block.raw
    head, rest = block.raw.split("\n", 1)
    return f"{_OPTION.sub('', head).rstrip()}\n{rest}"
