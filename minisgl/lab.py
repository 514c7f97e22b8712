"""``python -m minisgl.lab``: starts a lab, grades it, gives hints. The program itself is `minisgl.chapters.lab.cli`."""

from __future__ import annotations

from minisgl.chapters.lab.cli import run

if __name__ == "__main__":
    run()
