"""A search for a failing workload: random workloads of growing size, and the first that fails is shrunk."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from minisgl.chapters.lab.grader.calibration import slowness
from minisgl.chapters.lab.grader.diagnosis import diagnose
from minisgl.chapters.lab.grader.gate import UNIT_SECONDS, Broken, Invalid, Student, TimedOut
from minisgl.chapters.lab.grader.shrink import smallest
from minisgl.testing.serving import scaled_timeout

TRY_SECONDS = 6.0
"""Seconds of processor time after which one workload counts as hanging, on an idle machine.

Right solutions with a loop in Python need up to 2 s. On a slower or busy machine the limit is as many times as high as
a calibration run, beside the workload, takes longer (`minisgl.chapters.lab.grader.calibration`).
"""
WAIT_SECONDS = 5.0
"""Wall-clock seconds after which one workload counts as hanging, on a machine with an idle core.

The limit is above `TRY_SECONDS`, which is processor time: the code may wait, or the machine may be busy.
"""
COMPUTING_SHARE = 0.02
"""Code that has used at least this share of `WAIT_SECONDS` as processor time does not wait: the machine is busy.

It may then run on until `TRY_SECONDS` or the gate's deadline.
"""


def search(
    make: Callable[[random.Random, int], Any],
    run: Callable[[Student, Any], None],
    *,
    tries: int = 100,
    seconds: float = 1.5,
    at_least: int = 1,
    show: Callable[[Any], str] = repr,
) -> Callable[[Student], str]:
    """Return a gate's ``run`` that searches for a failing workload.

    The search calls ``make(rng, size)`` for the sizes 1, 2, 3, … and ``run(student, workload)`` with each workload. It
    ends after ``tries`` workloads or ``seconds`` of processor time, whichever comes first. The first ``at_least``
    workloads run even if they take more processor time, for example those that ``make`` does not draw at random.

    A workload is JSON: dicts, lists, integers, strings. The first workload that fails is shrunk: elements of its lists
    are removed and its integers are lowered as long as ``run`` raises `Broken` with the same cause. So ``run`` must
    raise `Invalid` for a meaningless workload. ``show`` describes the result in a few lines.
    """

    def attempt(student: Student, workload: Any) -> Broken | None:
        shown = ""
        with contextlib.suppress(Exception):  # a shrunk workload may be meaningless
            shown = show(workload)
        student.on_workload(workload, shown)
        try:
            # The ranks of a workload may be threads, for which the main thread waits: they get less of a busy machine.
            waiting = scaled_timeout(WAIT_SECONDS) * student.patience
            with alarm(TRY_SECONDS * student.patience, waiting, student.seconds_left - 1.0):
                run(student, workload)
        except Broken as broken:
            return broken
        except Invalid:
            return None
        except (Exception, TimedOut) as error:
            return diagnose(student, error)
        return None

    def run_search(student: Student) -> str:
        rng = student.random
        started, computed = time.monotonic(), time.process_time()
        found: Broken | None = None
        workload: Any = student.replay
        if student.replay is not None:
            found = attempt(student, workload)
        tried_at, tried, longest = started, 0, 0.0
        share = student.search_share
        while student.replay is None and found is None and tried < max(tries * share, at_least):
            # In processor time: a busy machine tries as many workloads as an idle one, if the watchdog's limit is far.
            enough = tried >= max(at_least, 1)
            spent = time.process_time() - computed > seconds * share * student.slower
            # A workload during which the gate's time ends is reported as "hangs". So none begins that may take as long.
            short = student.seconds_left - 1.0 < 2.0 * longest
            if tried and (
                (enough and spent) or short or student.seconds_left < UNIT_SECONDS * (0.5 if enough else 0.35)
            ):
                break
            tried += 1
            workload, tried_at = make(rng, tried), time.monotonic()
            found = attempt(student, workload)
            longest = max(longest, time.monotonic() - tried_at)
        if found is None:
            return f"{tried or 1} workloads"
        broken, cause = found, found.cause
        if cause == "unfinished":  # every workload shows it: nothing to shrink
            raise broken
        # Code that waits until WAIT_SECONDS would do so for every smaller workload too: shrinking takes too long.
        waits = cause == "hangs" and time.monotonic() - tried_at > WAIT_SECONDS * student.patience / 2
        if student.replay is None and not waits:

            def still(smaller: Any) -> Broken | None:
                try:
                    show(smaller)
                except Exception:  # a part behind the failure is meaningless now
                    return None
                again = attempt(student, smaller)
                return again if again is not None and again.cause == cause else None

            until = min(student.deadline - 2.5, time.monotonic() + student.shrink_seconds)
            workload, broken = smallest(workload, broken, still, until)
        broken.workload, broken.show = workload, broken.show or show(workload)
        raise broken

    return run_search


def computing_since() -> Callable[[], float]:
    """Return a function that returns how much processor time this thread and threads started later got since now.

    The other threads of the process, which are left from earlier code, do not count while they are alive.
    """
    own = threading.get_native_id()
    others = {number for number in thread_seconds() if number != own}

    def of_others() -> float:
        return sum(seconds for number, seconds in thread_seconds().items() if number in others)

    began = time.process_time() - of_others()
    return lambda: time.process_time() - of_others() - began


def thread_seconds() -> dict[int, float]:
    """Return the processor time of each thread of this process, by the thread's number in the operating system."""
    with contextlib.suppress(psutil.Error, OSError):  # a sandbox may hide the threads
        return {thread.id: thread.user_time + thread.system_time for thread in psutil.Process().threads()}
    return {}


@contextlib.contextmanager
def alarm(computing: float, waiting: float, most: float) -> Iterator[None]:
    """Raise `TimedOut` in the main thread: after ``computing`` s of processor time, or ``waiting`` s of waiting.

    ``computing`` is the limit of an idle machine; on a slow one it is higher.

    Code on a busy machine gets little processor time without waiting. So the code is looked at every ``waiting`` s: if
    it got more than `COMPUTING_SHARE` of that time, it goes on, for up to ``most`` seconds. The threads that it has
    started, such as the ranks of a workload, count too. Threads that other code left behind do not.
    """
    most = max(most, 0.1)
    waiting = min(waiting, most)
    computed = computing_since()
    used = 0.0
    begun = time.process_time()

    def ring(number: int, frame: Any) -> None:
        nonlocal used
        before, used = used, computed()
        left = until - time.monotonic()
        if number == signal.SIGALRM and left > 0 and used - before > COMPUTING_SHARE * waiting:
            signal.setitimer(signal.ITIMER_REAL, min(left, waiting))
            return
        if number == signal.SIGPROF:
            spent, allowed = time.process_time() - begun, computing * slowness()
            if spent < allowed:  # the machine is slow now, not the code
                signal.setitimer(signal.ITIMER_PROF, max(allowed - spent, 0.05))
                return
        spent = used
        if number == signal.SIGALRM and used - before <= COMPUTING_SHARE * waiting:
            raise TimedOut(f"It waited: in the last {waiting:.0f} s it computed for {used - before:.2f} s")
        raise TimedOut(f"It was stopped after {spent:.1f} s of processor time for one workload")

    until = time.monotonic() + most - 0.05  # the timer may ring a little early
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
