"""A gate that tries random workloads: small ones first; it shrinks the first that fails before it reports it."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from minisgl.course.lab.grader.blame import blame
from minisgl.course.lab.grader.gate import UNIT_SECONDS, Broken, Hangs, Invalid, Student
from minisgl.course.lab.grader.shrink import smallest

SHRINK_SECONDS = 2.0
"""How long a search makes a failing workload smaller."""
TRY_SECONDS = 1.0
"""How long one workload of a search may compute before it counts as hanging."""
WAIT_SECONDS = 5.0
"""How long it may take by the clock: it may wait for something, or the machine may be busy with others."""


def search(
    make: Callable[[random.Random, int], Any],
    run: Callable[[Student, Any], None],
    *,
    tries: int = 100,
    seconds: float = 1.5,
    show: Callable[[Any], str] = repr,
) -> Callable[[Student], str]:
    """A gate's ``run`` that tries workloads: ``make(rng, size)`` for growing sizes 1, 2, 3 …, each given to
    ``run(student, workload)``, for ``tries`` tries or ``seconds`` of processor time, whichever ends first.

    A workload is JSON: dicts, lists, whole numbers, texts. The first that breaks is made smaller: elements of its
    lists are left out and its numbers lowered, as long as ``run`` raises the same cause. So ``run`` must raise
    `Invalid` for one that makes no sense. ``show`` draws the result in a few lines.
    """

    def attempt(student: Student, workload: Any) -> Broken | None:
        shown = ""
        with contextlib.suppress(Exception):  # a shrunk one may make no sense
            shown = show(workload)
        student.doing(workload, shown)
        try:
            with alarm(TRY_SECONDS, max(min(WAIT_SECONDS, student.left - 1.0), 0.1)):
                run(student, workload)
        except Broken as broken:
            return broken
        except Invalid:
            return None
        except (Exception, Hangs) as error:
            return blame(student, error)
        return None

    def whole(student: Student) -> str:
        rng = student.random
        started, computed = time.monotonic(), time.process_time()
        found: Broken | None = None
        workload: Any = student.replay
        if student.replay is not None:
            found = attempt(student, workload)
        begun, tried = started, 0
        while student.replay is None and found is None and tried < tries:
            # Processor time, so that a busy machine tries no less, as long as the watchdog leaves room.
            if tried and (time.process_time() - computed > seconds or student.left < UNIT_SECONDS / 2):
                break
            tried += 1
            workload, begun = make(rng, tried), time.monotonic()
            found = attempt(student, workload)
        if found is None:
            return f"{tried or 1} workloads"
        broken, cause = found, found.cause
        if cause == "unfinished":  # whatever is tried
            raise broken
        waits = cause == "hangs" and time.monotonic() - begun > WAIT_SECONDS / 2  # each smaller one would, too
        if student.replay is None and not waits:

            def still(smaller: Any) -> Broken | None:
                again = attempt(student, smaller)
                return again if again is not None and again.cause == cause else None

            until = min(student.deadline - 2.5, time.monotonic() + SHRINK_SECONDS)
            workload, broken = smallest(workload, broken, still, until)
        broken.workload, broken.show = workload, broken.show or show(workload)
        raise broken

    return whole


@contextlib.contextmanager
def alarm(computing: float, waiting: float) -> Iterator[None]:
    """Raise `Hangs` in the main thread's Python code after so many seconds of processor time, or of the clock's."""

    def ring(number: int, frame: Any) -> None:
        raise Hangs

    timers = {signal.SIGPROF: (signal.ITIMER_PROF, computing), signal.SIGALRM: (signal.ITIMER_REAL, waiting)}
    before = {number: signal.signal(number, ring) for number in timers}
    for timer, seconds in timers.values():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer, _ in timers.values():
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
