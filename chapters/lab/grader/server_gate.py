"""Gates that use the real server: ``python -m minisgl`` with the student's file, queried with the ``openai`` client.

`Served` starts one server for each run of the grader, and stops it. The expected answers are facts that the prompts
contain, so no reference solution is needed. Knows the command line and ``/metrics``; the student's code does not run in
this process.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from minisgl.chapters.lab.catalog import Lab
from minisgl.chapters.lab.grader.calibration import slowness
from minisgl.chapters.lab.grader.gate import Broken, Gate, Missing
from minisgl.testing.serving import Server, patient_timeout, scaled_timeout

__all__ = ["QUESTIONS", "Served", "check_called", "check_idle", "facts"]

START_SECONDS = 45.0
"""Seconds of processor time that one process of the server may take to start, on an idle machine."""
QUIET_SECONDS = 30.0
"""Seconds without progress after which the server counts as waiting forever, on a machine with an idle core."""
QUIET_SHARE = 0.004
"""A server that starts uses at least this share of `QUIET_SECONDS` as processor time, even on a busy machine."""
MOST_START_SECONDS = 900.0
"""Seconds after which the gate gives up on a machine that is too slow, without a verdict."""
ENDS = {"dies": "", "hangs": ": it computes or waits without end"}
ANSWER_SECONDS = 20.0
"""Seconds that one answer may take, on a machine with an idle core."""

_BOOK = """\
Handbook of the Riverside Library
The reading room opens at 9:30. The reading room closes at 18:00.
The chess club meets in room 12. The chess club is led by Maria.
The door code of the archive is {code}.
You can borrow the atlas for 14 days. The globe costs {price} euros.
Bus 7 goes to the museum."""

QUESTIONS: tuple[tuple[str, str, str], ...] = tuple(
    (_BOOK.format(code=code, price=price), question, answer)
    for code, price in (("4071", "35"), ("2936", "35"), ("4071", "48"))
    for question, answer in (
        ("What is the door code of the archive?", code),
        ("How much does the globe cost?", price),
        ("In which room does the chess club meet?", "12"),
    )
)
"""(handbook, question, text that the answer must contain). The three handbooks differ in one line each."""


def wait_for_start(server: Any) -> str | None:
    """Wait until the server is ready, and return None, or ``dies``, ``hangs`` or ``slow``.

    The limits do not depend on the load: a process hangs if it used `START_SECONDS` of processor time, times what a
    calibration run takes longer than on an idle machine, or if all processes used next to none for a while.
    """
    until, quiet = time.monotonic() + MOST_START_SECONDS, [(time.monotonic(), 0.0, 0)]
    while time.monotonic() < until:
        try:
            server.wait_until_ready(min(2.0, max(until - time.monotonic(), 0.1)))
            return None
        except RuntimeError:
            if server.process.poll() is not None:
                return "dies"
        used = processor_seconds(server.process.pid)
        if max(used, default=0.0) > START_SECONDS * slowness():
            return "hangs"
        now, total, said = time.monotonic(), sum(used), len(server.log())
        began, before, lines = quiet[0]
        # A process that ends, such as a compiler, takes its processor time with it: the server goes on after it.
        if total < before or total - before > QUIET_SHARE * QUIET_SECONDS or said != lines:
            quiet[0] = now, total, said
        elif now - began > scaled_timeout(QUIET_SECONDS):
            return "hangs"
    return "slow"


def processor_seconds(pid: int) -> list[float]:
    """Return the processor time of each process of a server, in seconds."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(pid)
        for process in [launcher, *launcher.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                found.append(times.user + times.system)
    return found


class Served:
    """A server with the student's plugin, as a context manager.

    The server gets the lab's options and those in ``SERVER`` of the gates' module. A server that does not start raises
    nothing on entry: `run` raises the failure for each gate.
    """

    def __init__(self, lab: Lab, path: Path, sha256: str):
        self.lab, self.path, self.sha256 = lab, path, sha256
        self.server: Server | None = None
        self.start: Callable[..., Server] = Server
        self.run_there: Callable[..., Any] = lambda function, *args: function(*args)
        """Calls a function of `chapters.lab.grader.tutor_runs` in the process that may run the student's code."""
        self._failure: Broken | Missing | None = None

    def __enter__(self) -> Served:
        words = ["model=tutor", "num_pages=512", f"plugins={self.path}", *self.lab.words]
        words += getattr(self.lab.module, "SERVER", [])
        self.begin(words)
        return self

    def begin(self, words: Sequence[str], **more: Any) -> None:
        """Start the server with the options ``words``, or keep the failure for `run`. ``more`` is for `Server`."""
        self.server = self.start(*words, wait=False, attached=True, **more)
        try:
            ended = wait_for_start(self.server)
        except BaseException:
            self.server.close()
            raise
        if ended is not None:
            log = [line.strip() for line in self.server.log().splitlines() if line.strip()]
            last = " | ".join(log[-2:]) or "nothing"
            command = "python -m minisgl " + " ".join(words[2:])
            if ended == "slow":
                self._failure = Missing(
                    f"your machine is slow: the server was not ready after {MOST_START_SECONDS / 60:.0f} minutes, and "
                    f"still worked. It waited for: {last}"
                )
            else:
                seen = f"`{command}` did not start{ENDS[ended]}. The end of its log: {last}"
                self._failure = Broken(ended, "The real server starts with the plugin.", seen)
            self.server.close()
            self.server = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.server is not None:
            self.server.close()

    def run(self, gate: Gate) -> str | None:
        """Run one gate against the server. Raise the gate's exceptions, or the failure of the server's start."""
        if self._failure is not None:
            raise self._failure
        return gate.run(self)

    # ---- requests and metrics -----------------------------------------------------------------------------

    def client(self) -> Any:
        """Return an ``openai`` client of the server. Raise `Missing` if the package is not installed."""
        try:
            import openai
        except ImportError as error:
            raise Missing(
                "this gate needs the openai client, which is not installed: pip install -e '.[lab]'"
            ) from error
        assert self.server is not None
        seconds = scaled_timeout(ANSWER_SECONDS)
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key="none", max_retries=0, timeout=seconds)

    def log(self, lines: int = 3) -> str:
        """Return the end of the server's standard error, at most 400 characters for each of ``lines``."""
        assert self.server is not None
        return " | ".join(line.strip() for line in self.server.log().splitlines() if line.strip())[-400 * lines :]

    def calls(self) -> dict[str, dict[str, float]]:
        """Return how often the student's file was called: process → method or hook → number of calls.

        The numbers come from ``/metrics``, which identifies the file by its path and hash.
        """
        assert self.server is not None
        found: dict[str, dict[str, float]] = {}
        for name, value in self.server.metrics().items():
            if not name.startswith("minisgl_plugin_calls_total{"):
                continue
            labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', name))
            if labels["sha256"] == self.sha256 and labels["path"] == str(self.path):
                found.setdefault(labels["process"], {})[labels["call"]] = value
        return found


def together(jobs: Sequence[Callable[[], None]]) -> None:
    """Run each job in its own thread. Raise the first exception after all have ended."""
    failed: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def facts(calls: Sequence[str], process: str = "scheduler-0") -> Gate:
    """Return the gate that every lab has for the server.

    The gate sends all `QUESTIONS` at once, together with a request whose client disconnects. Each answer must contain
    its own handbook's fact, all pages must be free or cached afterwards, and the server process ``process`` must have
    called each of ``calls`` (methods or hooks of the student's plugin).
    """

    def run(served: Served) -> str:
        client = served.client()
        _ask_all(served, client)
        check_idle(served)
        counted = check_called(served, calls, process)
        # The processes report their counts four times a second: the newest calls may be missing.
        return f"{process} called at least " + ", ".join(f"{name} {int(counted[name])}×" for name in calls)

    return Gate("server", "the real server gives right answers and calls the plugin", run, served=True)


def _ask_all(served: Served, client: Any) -> None:
    """Send all questions and the request that is aborted. Raise `Broken` for the first wrong or missing answer."""
    wrong: list[Broken] = []

    def ask(book: str, question: str, answer: str) -> None:
        messages = [{"role": "system", "content": book}, {"role": "user", "content": question}]
        reply = client.chat.completions.create(model="tutor", messages=messages, temperature=0, max_tokens=40)
        text = reply.choices[0].message.content or ""
        if answer not in text:
            others = [other for _, q, other in QUESTIONS if q == question and other != answer and other in text]
            mixed = " The handbook of another request says that." if others else ""
            seen = f"{question} The handbook in the prompt says {answer}; the answer was {text[:80]!r}.{mixed}"
            wrong.append(Broken("promise", "An answer does not depend on other requests (promise 8).", seen))

    def hang_up() -> None:
        stream = client.chat.completions.create(
            model="tutor", messages=[{"role": "user", "content": "Count from 1 to 60."}], max_tokens=200, stream=True
        )
        next(iter(stream))
        stream.close()

    import openai

    try:
        together([hang_up, *(lambda q=q: ask(*q) for q in QUESTIONS)])
    except openai.APITimeoutError as error:
        seen = f"A request had no answer after {scaled_timeout(ANSWER_SECONDS):.0f} s. The server's log: {served.log()}"
        raise Broken("hangs", "Every request ends with exactly one final reply (promise 1).", seen) from error
    except openai.OpenAIError as error:
        seen = f"{type(error).__name__}: {error}. The server's log: {served.log()}"
        raise Broken("dies", "Every request ends with exactly one final reply (promise 1).", seen) from error
    if wrong:
        raise wrong[0]


def check_idle(served: Served) -> None:
    """Wait until the aborted request has left, then check promise 9: every page is free or cached and unused."""
    assert served.server is not None
    until = time.monotonic() + patient_timeout(5.0)
    while not served.server.idle_pool():
        if time.monotonic() > until:
            names = ("free", "cached", "evictable", "retiring")
            now = served.server.metrics()
            pages = ", ".join(f"{int(now[f'minisgl_scheduler_num_{name}_pages'])} {name}" for name in names)
            total = int(now["minisgl_scheduler_num_pages"])
            promise = "When the server is idle, every page is free or in the cache, and none is in use (promise 9)."
            raise Broken("promise", promise, f"Of {total} pages: {pages}.")
        time.sleep(0.05)


def check_called(served: Served, calls: Sequence[str], process: str) -> dict[str, float]:
    """Return the call counts of ``process``. Raise `Broken` if one of ``calls`` has not been called."""
    until = time.monotonic() + patient_timeout(3.0)
    while True:
        counted = served.calls().get(process, {})
        missing = [name for name in calls if not counted.get(name)]
        if not missing:
            return counted
        if time.monotonic() > until:
            seen = f"The server answered, but {process} never called {', '.join(missing)} of {served.path.name}."
            raise Broken("never-called", "The server calls the plugin in your file.", seen)
        time.sleep(0.1)
