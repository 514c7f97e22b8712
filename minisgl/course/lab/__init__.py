"""The course's labs: skeletons generated from the shipped plugins, and the grader of what a student makes of them.

``python -m minisgl.lab`` is the command. A lab is described in ``chapters/*/<lab>.toml`` and graded by the gates in
``minisgl/course/lab/gates/<lab>.py``; docs/labs.md says how to write one.
"""

from __future__ import annotations

from minisgl.course.lab.grader.gate import Broken, Gate, Invalid, Student
from minisgl.course.lab.grader.search import search

__all__ = ["Broken", "Gate", "Invalid", "Student", "search"]
