"""What a gate is, what it is given of the student, and how it says that a promise was broken.

For those who write labs. A gate that tries random workloads is a `search`: it starts small, and what fails is made
smaller still before anybody sees it. Knows no lab, and not in which process it runs.
"""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minisgl.host import Host, Plugin
from minisgl.lab.catalog import Lab
from minisgl.lab.shrink import smallest

__all__ = ["Broken", "Gate", "Hangs", "Invalid", "Missing", "Student", "search"]

UNIT_SECONDS = 10.0
"""How long a gate may take before its process is killed, on a machine with a core to spare."""
SHRINK_SECONDS = 2.0
"""How long a search makes a failing workload smaller."""
TRY_SECONDS = 1.0
"""How long one workload of a search may compute before it counts as hanging."""
WAIT_SECONDS = 5.0
"""How long it may take by the clock: it may wait for something, or the machine may be busy with others."""


class Broken(Exception):  # noqa: N818 - a verdict
    """A promise was broken. ``cause`` is one of the lab's causes (or of `catalog.CAUSES`), ``promise`` what should
    hold, in one line, ``seen`` what happened instead. The rest says where, as far as it is known; ``workload`` is
    what shows it (JSON), and ``show`` that in a few lines for a person."""

    def __init__(
        self,
        cause: str,
        promise: str,
        seen: str,
        *,
        step: int | None = None,
        request: int | None = None,
        page: int | None = None,
        workload: Any = None,
        show: str = "",
    ):
        super().__init__(f"{cause}: {promise} {seen}")
        self.cause, self.promise, self.seen = cause, promise, seen
        self.step, self.request, self.page = step, request, page
        self.workload, self.show = workload, show


class Invalid(Exception):  # noqa: N818
    """A workload makes no sense (a shrunk one may not): try another."""


class Missing(Exception):  # noqa: N818 - nothing is wrong with the student's file
    """A gate needs a package that is not installed, and can't be tried. Says how to install it."""


class Hangs(BaseException):
    """A try took too long. Raised inside the code that runs; a student's ``except Exception`` does not catch it."""


@dataclass
class Student:
    """A student's file, loaded, as a gate sees it. ``seed`` is fresh in each run and printed."""

    lab: Lab
    path: Path
    seed: int = 0
    gate: str = ""
    replay: Any = None
    """The workload to try instead of searching for one."""
    deadline: float = field(default_factory=lambda: time.monotonic() + UNIT_SECONDS)
    doing: Callable[[Any, str], None] = lambda workload, show: None
    """Told each workload before it is tried, and how it is shown, so that a killed gate can name it."""

    def __post_init__(self) -> None:
        self.host = Host()
        """Has the student's plugin and no other."""
        self.plugin: Plugin | None = None

    def load(self) -> None:
        """Load the file. Raises `ConfigError`."""
        self.plugin = self.host.add(str(self.path))

    def config(self, **options: Any) -> Any:
        """The student's config object for the lab's group, with these options. Raises `ConfigError`."""
        assert self.lab.hook is not None
        return self.host.schema(self.lab.hook, self.lab.name)(**options)

    def make(self, config: Any = None, **kwargs: Any) -> Any:
        """What the student's factory makes of ``config`` (None: the default options); ``kwargs`` are what the hook is
        given beside it, as ``page_size=4``. Raises `ConfigError` where it makes nothing."""
        assert self.lab.hook is not None
        return self.host.build(self.lab.hook, self.config() if config is None else config, **kwargs)

    @property
    def random(self) -> random.Random:
        """A new generator: the same in each run with this seed, another in each gate."""
        return random.Random(f"{self.seed} {self.gate}")

    @property
    def left(self) -> float:
        """Seconds before the watchdog ends the gate."""
        return self.deadline - time.monotonic()


@dataclass(frozen=True)
class Gate:
    """One thing that a lab checks. ``run`` returns, perhaps what it counted in a few words, or raises `Broken` (or
    anything else: that is red too).

    ``part`` is the part that this gate grades by itself: red before it is written, green after. ``served`` gates run
    in the grader's own process, beside the server that it has started: they get no loaded plugin.
    """

    name: str
    says: str
    run: Callable[[Any], str | None]
    part: str | None = None
    limit: float = UNIT_SECONDS
    served: bool = False


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
            from minisgl.lab.blame import blame

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
