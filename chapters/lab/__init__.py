"""The course's labs: skeletons generated from the shipped plugins, and the grader of the students' files.

The command line is ``python -m minisgl.lab``. A lab is described in ``chapters/*/<lab>.toml`` and graded by the gates
in ``chapters/lab/gates/<lab>.py``; docs/labs.md explains how to write a lab.
"""

from __future__ import annotations

from minisgl.chapters.lab.grader.gate import Broken, Gate, Invalid, Student
from minisgl.chapters.lab.grader.search import search

__all__ = ["Broken", "Gate", "Invalid", "Student", "search"]
