"""Counts the lines of a student's file that Python executes: work that no machine does faster or slower.

A loop over a list executes its lines once for each element. One call of numpy, on arrays of any size, is one line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from minisgl.chapters.lab.grader.gate import Student
from minisgl.chapters.lab.grader.observer_runs import observer, run, watch
from minisgl.core import Output

__all__ = ["REQUESTS", "counted_lines", "lines_of_a_decode_step"]

REQUESTS, PROMPT, ANSWER = 16, 2000, 44
"""The requests of the run, and the tokens of each prompt and answer."""
FIRST, LAST = 8, 40
"""The counted steps of the run. In all of them, every request decodes."""
UID, COLUMN = 7, 90
"""The request that reads the evicted page, and the page's column in the request's row of the page table."""


@contextmanager
def counted_lines(path: Path) -> Iterator[Callable[[], int]]:
    """Count the executed lines of a file, and yield a function that returns their number so far."""
    name, lines = str(path), 0

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        return on_line if frame.f_code.co_filename == name else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield lambda: lines
    finally:
        sys.settrace(before)


def lines_of_a_decode_step(student: Student) -> tuple[int, bool]:
    """Return how many lines the student's auditor executes in a decode step, and whether its findings are right.

    The simulated engine serves `REQUESTS` requests. The number of lines is an average, rounded up. After the counted
    steps, the auditor hears that the cache has evicted a page that a request reads: this is the only error.
    """
    job = {"stem": 0, "shared": 0, "own": PROMPT, "answer": ANSWER, "arrive": 0}
    workload = {
        "page_size": 16,
        "pages": 4 * PROMPT * REQUESTS // 48,
        "slots": REQUESTS,
        "chunk": PROMPT * REQUESTS,
        "jobs": [{"id": i + 1, **job} for i in range(REQUESTS)],
        "policy": "mixed",
        "cache": "radix",
        "overlap": 1,
    }
    auditor, manager = observer(student, "findings")
    drive = watch(workload, manager)
    marks: dict[int, int] = {}  # number of steps so far -> executed lines
    findings: dict[int, list[Any]] = {}  # number of steps so far -> findings
    page = -1
    with counted_lines(student.path) as executed:

        def look(output: Output | None) -> None:
            nonlocal page
            step, scheduler = drive.report.steps, drive.scheduler
            marks[step] = executed()
            findings[step] = [(each.rule, each.uid, each.page) for each in auditor.findings]
            if step == LAST:
                row = scheduler.requests[UID].req_pool_idx
                pages = scheduler.cache_manager.request_table.page_table[row, COLUMN : COLUMN + 1].copy()
                manager.hook.minisgl_pages_evicted(step=scheduler.next_step_id, pages=pages)
                page = int(pages[0])

        drive.look = look
        run(drive, workload)
    right = not findings[LAST] and findings[LAST + 1] == [("table", UID, page)]
    return -(-(marks[LAST] - marks[FIRST]) // (LAST - FIRST)), right
