"""The outputs in the chapters are those of their code, and the checks of their text pass.

Each page runs in a process of its own. ``make pages`` writes the outputs again.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from minisgl.course.site.__main__ import course
from minisgl.course.site.render import pages_to_render

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = [path for path, _ in course(ROOT)]


@pytest.mark.parametrize("page", [page.relative_to(ROOT).as_posix() for page in pages_to_render()])
def test_page_has_the_output_of_its_code(page: str) -> None:
    command = [sys.executable, "-m", "minisgl.course.site.render", "--check", page]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_chapter_is_rendered() -> None:
    assert set(CHAPTERS) <= {page.relative_to(ROOT).as_posix() for page in pages_to_render()}
