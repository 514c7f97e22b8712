"""``python -m minisgl.lab``: begin a lab, grade it, get a hint. The program is `minisgl.course.lab.cli`."""

from __future__ import annotations

from minisgl.course.lab.cli import run

if __name__ == "__main__":
    run()
