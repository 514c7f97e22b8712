"""The last gate but one: ``python -m minisgl`` with the student's file, asked over HTTP with the ``openai`` client.

`Served` starts one server a grading, and ends it. What its answers must be is known without any reference: facts that
stand in a prompt. Knows the command line and ``/metrics``; no code of the student's runs in this process.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from minisgl.course.lab.catalog import Lab
from minisgl.course.lab.grader.gate import Broken, Gate, Missing
from minisgl.testing.serving import Server, patience

__all__ = ["QUESTIONS", "Served", "facts"]

START_SECONDS = 45.0
ANSWER_SECONDS = 20.0
"""How long a start, and an answer, may take on a machine with a core to spare."""

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
"""A handbook, a question about it, and what the answer must contain. Three handbooks differ in one line each."""


class Served:
    """A server with the student's plugin; ``module.SERVER`` may add options to those of the lab. Not started before
    it is entered; raises nothing then: `run` tells of a server that did not come up."""

    def __init__(self, lab: Lab, path: Path, sha256: str):
        self.lab, self.path, self.sha256 = lab, path, sha256
        self.server: Server | None = None
        self._failure: Broken | Missing | None = None

    def __enter__(self) -> Served:
        words = ["model=tutor", "num_pages=512", f"plugins={self.path}", *self.lab.words]
        words += getattr(self.lab.module, "SERVER", [])
        try:
            self.server = Server(*words, timeout=patience(START_SECONDS), attached=True)
        except RuntimeError as error:
            said = [line for line in str(error).splitlines()[1:] if line.strip()]
            command = "python -m minisgl " + " ".join(words[2:])
            seen = f"{command} did not come up: {' | '.join(said[-2:]) or str(error)}"
            self._failure = Broken("dies" if said else "hangs", "The real server starts with it.", seen)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.server is not None:
            self.server.close()

    def run(self, gate: Gate) -> str | None:
        """One gate beside the server. Raises what it raises."""
        if self._failure is not None:
            raise self._failure
        return gate.run(self)

    # ---- asking -------------------------------------------------------------------------------------------

    def client(self) -> Any:
        """An ``openai`` client of the server."""
        try:
            import openai
        except ImportError as error:
            raise Missing(
                "this gate asks with the openai client, which is not installed: pip install -e '.[lab]'"
            ) from error
        assert self.server is not None
        seconds = patience(ANSWER_SECONDS)
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key="none", max_retries=0, timeout=seconds)

    def log(self, lines: int = 3) -> str:
        """The last lines of what the server wrote to standard error."""
        assert self.server is not None
        return " | ".join(line.strip() for line in self.server.log().splitlines() if line.strip())[-400 * lines :]

    def calls(self) -> dict[str, dict[str, float]]:
        """How often the student's file was called: process → what was called → times. From ``/metrics``, which names
        the file by its path and hash."""
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
    """Run each in a thread of its own; raises what the first of them raised."""
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
    """The gate that every lab ends with: questions come together, one client hangs up, each answer holds the fact
    that its own handbook has, the pool is whole afterwards, and ``process`` did call each of ``calls``."""

    def run(served: Served) -> str:
        client = served.client()
        _ask_all(served, client)
        _check_idle(served)
        made = _check_called(served, calls, process)
        return ", ".join(f"{name} {int(made[name])}×" for name in calls) + f" in {process}, as /metrics counts"

    return Gate("server", "the real server answers right with it, and calls it", run, served=True)


def _ask_all(served: Served, client: Any) -> None:
    wrong: list[Broken] = []

    def ask(book: str, question: str, answer: str) -> None:
        messages = [{"role": "system", "content": book}, {"role": "user", "content": question}]
        said = client.chat.completions.create(model="tutor", messages=messages, temperature=0, max_tokens=40)
        text = said.choices[0].message.content or ""
        if answer not in text:
            others = [other for _, q, other in QUESTIONS if q == question and other != answer and other in text]
            whose = " That is what another request's handbook says." if others else ""
            seen = f"{question} The handbook in the prompt says {answer}; the answer was {text[:80]!r}.{whose}"
            wrong.append(Broken("promise", "An answer does not depend on who else is served (promise 8).", seen))

    def hang_up() -> None:
        stream = client.chat.completions.create(
            model="tutor", messages=[{"role": "user", "content": "Count from 1 to 60."}], max_tokens=200, stream=True
        )
        next(iter(stream))
        stream.close()

    import openai

    try:
        together([hang_up, *(lambda q=q: ask(*q) for q in QUESTIONS)])  # type: ignore[misc]
    except openai.APITimeoutError as error:
        seen = f"No answer came for {patience(ANSWER_SECONDS):.0f} s. The server said: {served.log()}"
        raise Broken("hangs", "Every request ends with exactly one final reply (promise 1).", seen) from error
    except openai.OpenAIError as error:
        seen = f"{type(error).__name__}: {error}. The server said: {served.log()}"
        raise Broken("dies", "Every request ends with exactly one final reply (promise 1).", seen) from error
    if wrong:
        raise wrong[0]


def _check_idle(served: Served) -> None:
    """Promise 9 on the real pool, as soon as the one who hung up is gone."""
    assert served.server is not None
    until = time.monotonic() + patience(5.0)
    while not served.server.idle_pool():
        if time.monotonic() > until:
            names = ("free", "cached", "evictable", "retiring")
            now = served.server.metrics()
            pages = ", ".join(f"{int(now[f'minisgl_scheduler_pages_{name}'])} {name}" for name in names)
            total = int(now["minisgl_scheduler_pages"])
            raise Broken("promise", "The pool is whole when idle (promise 9).", f"Of {total} pages: {pages}.")
        time.sleep(0.05)


def _check_called(served: Served, calls: Sequence[str], process: str) -> dict[str, float]:
    until = time.monotonic() + patience(3.0)
    while True:
        made = served.calls().get(process, {})
        missing = [name for name in calls if not made.get(name)]
        if not missing:
            return made
        if time.monotonic() > until:
            seen = f"The server answered, and {process} never called {', '.join(missing)} of {served.path.name}."
            raise Broken("never-called", "The server computes with your file.", seen)
        time.sleep(0.1)
