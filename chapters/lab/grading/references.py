"""``python -m minisgl.chapters.lab.grading.references``: grade every lab's reference solution with ``lab grade``.

The words of the command line are options of ``lab grade``. The exit status is 0 only if every gate is green.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from minisgl.chapters.lab.catalog import labs
from minisgl.chapters.lab.cli import main as lab_command
from minisgl.chapters.lab.skeletons import solution

__all__ = ["main"]


def main(words: list[str]) -> int:
    """Write the references of all labs that have one into a folder, grade it, and return the exit status."""
    with tempfile.TemporaryDirectory(prefix="minisgl-references-") as folder:
        for lab in labs():
            if lab.plugin:
                Path(folder, lab.file).write_text(solution(lab), "utf-8")
        return lab_command(["grade", folder, *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
