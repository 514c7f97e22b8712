"""Gates made of what the project has anyway: a conformance kit of `minisgl.testing`, and two engines side by side.

For those who write labs. Knows kits by their shape alone: a class with ``make`` and with tests that take nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from minisgl.course.lab.grader.gate import UNIT_SECONDS, Broken, Gate, Student
from minisgl.course.lab.grader.simulated_workloads import translate
from minisgl.scheduler.planner import PolicyError

__all__ = ["conformance", "greedy"]

Causes = Callable[[str], str | None]


def conformance(
    kit: Callable[[], type],
    make: Callable[..., Any],
    *,
    causes: Causes | None = None,
    limit: float = UNIT_SECONDS,
    **settings: Any,
) -> Gate:
    """The gate that runs every test of a kit: ``kit()`` imports its class, ``make(student, …)`` is its ``make``, and
    ``settings`` are attributes of it, such as how much it tries. ``causes`` names the lab's cause for what a failed
    test says, where it knows one."""

    def run(student: Student) -> str:
        subject: Any = type("Kit", (kit(),), {"make": lambda self, *args: make(student, *args), **settings})
        tests = [name for name in dir(subject) if name.startswith("test_")]
        assert tests, "the kit has no tests"
        for name in tests:
            try:
                getattr(subject(), name)()
            except (AssertionError, PolicyError) as error:
                broken = translate(error, causes)
                if isinstance(broken, Broken):
                    said = name.removeprefix("test_").replace("_", " ")
                    broken.promise = f"{said[0].upper()}{said[1:]}. ({kit().__name__})"
                raise broken from error
        return f"{len(tests)} tests of {kit().__name__}"

    return Gate("conformance", "the public conformance kit", run, limit=limit)


_BOOK = "Handbook of the Riverside Library\nThe reading room opens at 9:30. The chess club meets in room {room}.\n"
_PROMPTS = (
    *(_BOOK.format(room=room) + "In which room does the chess club meet?" for room in (12, 7, 12)),
    "What is a radix cache?",
    "What is 123 + 456?",
    "Count from 3 to 24.",
    "Sort these numbers: 7 3 9 1.",
)


def greedy(reference: Sequence[str], words: Sequence[str] = (), limit: float = 90.0) -> Gate:
    """The gate that serves prompts with `tutor` on a CPU, in one process, twice: with the options ``reference``, and
    with the student's plugin. Greedy tokens must be equal. ``words`` are options for both."""

    def run(student: Student) -> str:
        from minisgl.core import SamplingParams
        from minisgl.llm import LLM

        common = ["device=cpu", "num_pages=256", *words]
        params = SamplingParams(max_tokens=24, temperature=0.0)

        def ask(options: Sequence[str], times: int) -> list[list[list[int]]]:
            with LLM("tutor", overrides=[*common, *options]) as llm:
                return [[o.token_ids for o in llm.generate(_PROMPTS, params, progress=False)] for _ in range(times)]

        (expected,) = ask(reference, 1)
        mine = [f"plugins={student.path}", *student.lab.words]
        for turn, answers in enumerate(ask(mine, 2)):
            for prompt, answer, right in zip(_PROMPTS, answers, expected, strict=True):
                if answer == right:
                    continue
                at = next((i for i, (a, b) in enumerate(zip(answer, right, strict=False)) if a != b), len(answer))
                seen = (
                    f"Token {at} of the answer to {_short(prompt)!r} is another than with {' '.join(reference)}"
                    f"{', where the prompt was asked before' if turn else ''}."
                )
                raise Broken("promise", "Greedy answers are the same with any plugin (promise 8).", seen)
        return f"{2 * len(_PROMPTS)} answers as with {' '.join(reference)}"

    return Gate("engine", "tutor's greedy answers are the same with it", run, limit=limit)


def _short(text: str) -> str:
    return re.sub(r"\s+", " ", text)[-50:]
