"""The hooks of mkdocs that report how far a build is: without them, it says nothing until it has ended."""

from __future__ import annotations

import logging
from typing import Any

from mkdocs.structure.files import Files

log = logging.getLogger("mkdocs.plugins.minisgl")
EVERY = 10
"""Pages between two reports: a build reports about once a second."""
_done: dict[str, int] = {}
_total = 0


def on_files(files: Files, **_: Any) -> None:
    """Count the pages of the site, after the other hooks have added theirs."""
    global _total
    _total = len(files.documentation_pages())
    _done.clear()


def on_page_content(html: str, **_: Any) -> str:
    """Report pages whose text has become HTML."""
    _report("rendered")
    return html


def on_post_page(output: str, **_: Any) -> str:
    """Report pages that are complete."""
    _report("written")
    return output


def _report(what: str) -> None:
    _done[what] = done = _done.get(what, 0) + 1
    if done % EVERY == 0 or done == _total:
        log.info(f"{done} of {_total} pages {what}")
