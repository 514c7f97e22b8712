"""Runs the code of a page: blocks with ``exec="on"`` and checks of the text (``check="on"``).

Blocks with the same ``session`` share their variables. A check sees the variables of its session, the text that the
block before it printed (``printed``), and the functions `numbers` and ``says``. This module does not depend on mkdocs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from minisgl.chapters.site.blocks import Block, without_blocks

ROOT = Path(__file__).parents[2]


class PageError(Exception):
    """The code of a page failed, or the text of the page disagrees with the code."""


def prepare() -> None:
    """Set the working directory and the environment in which the code of the pages runs.

    The code finds the programs of this Python interpreter and computes on the CPU. A bash block fails if one of its
    commands fails, also in a pipe.
    """
    os.chdir(ROOT)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "88", "TQDM_DISABLE": "1"}
    os.environ["SHELLOPTS"] = "errexit:pipefail"


def text_of(markdown: str) -> str:
    """Return the text of a page without code blocks and comments, with single spaces between words."""
    return " ".join(re.sub(r"<!--.*?-->", "", without_blocks(markdown), flags=re.DOTALL).split())


def numbers(pattern: str, text: str) -> list[float]:
    """Return the numbers that the groups of ``pattern`` match in ``text``, in order; ``1,604`` is 1604.

    Raises ValueError if there is no match.
    """
    found = [group for match in re.finditer(pattern, text) for group in match.groups() if group]
    if not found:
        raise ValueError(f"{pattern!r} matches nothing in:\n{text}")
    values = [float(each.replace(",", "")) for each in found]
    return [int(value) if value.is_integer() else value for value in values]


class PageRunner:
    """Runs the blocks of one page in order."""

    def __init__(self, name: str, markdown: str) -> None:
        self.name = name
        self.printed = ""
        self._text = text_of(markdown)
        self._sessions: dict[str, dict[str, Any]] = {}

    def says(self, template: str, *values: object) -> None:
        """Raise AssertionError unless the page's text contains ``template`` with ``values`` filled in."""
        wanted = " ".join(template.format(*values).split())
        assert wanted in self._text, f"the text does not say {wanted!r}"

    def run(self, block: Block) -> str:
        """Run one block; return what it printed. A check prints nothing. Raises `PageError`."""
        try:
            printed = self._bash(block) if block.language == "bash" else self._python(block)
        except (Exception, SystemExit) as error:
            said = str(getattr(error, "stderr", "") or "")
            raise PageError(f"{self.name}, line {block.line}: {type(error).__name__}: {error}\n{said}") from error
        if "check" not in block.options:
            self.printed = printed
        return printed

    def _bash(self, block: Block) -> str:
        pipe = subprocess.PIPE
        done = subprocess.run(["bash", "-c", block.code], stdout=pipe, stderr=pipe, text=True, check=True)
        return done.stdout

    def _python(self, block: Block) -> str:
        variables = self._sessions.setdefault(block.options.get("session", ""), {"__name__": "__page__"})
        if "check" in block.options:
            variables |= {"printed": self.printed, "says": self.says, "numbers": numbers}
        code = compile("\n" * block.line + block.code, self.name, "exec")
        with redirect_stdout(StringIO()) as stdout:
            exec(code, variables)
        return stdout.getvalue()
