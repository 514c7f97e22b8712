"""Ready-made gates for authors of labs: a conformance kit of `minisgl.testing`, and greedy equality with the reference.

A kit is any class with a method ``make`` and with test methods that take no arguments. Knows no kit by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from minisgl.chapters.lab.grader.gate import UNIT_SECONDS, Broken, Gate, Student
from minisgl.chapters.lab.grader.simulated_workloads import translate
from minisgl.chapters.lab.grader.tutor_runs import generate
from minisgl.core import SamplingParams
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
    """Return the gate that runs every test of a conformance kit on the student's plugin.

    ``kit()`` imports and returns the kit's class. ``make(student, …)`` becomes the kit's method ``make``. ``settings``
    become attributes of the kit, such as its number of random runs. ``causes`` maps the message of a failed test to
    one of the lab's causes, or to None.
    """

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
                    said = (getattr(subject, name).__doc__ or name).strip().splitlines()[0]
                    broken.promise = f"{said} ({kit().__name__}.{name})"
                raise broken from error
        return f"{len(tests)} tests of {kit().__name__}"

    return Gate("conformance", "the plugin passes the public conformance kit", run, limit=limit)


_BOOK = "Handbook of the Riverside Library\nThe reading room opens at 9:30. The chess club meets in room {room}.\n"
_PROMPTS = (
    *(_BOOK.format(room=room) + "In which room does the chess club meet?" for room in (12, 7, 12)),
    "What is a radix cache?",
    "What is 123 + 456?",
    "Count from 3 to 24.",
    "Sort these numbers: 7 3 9 1.",
)


def greedy(reference: Sequence[str], words: Sequence[str] = (), limit: float = 90.0) -> Gate:
    """Return the gate that compares the student's greedy tokens with the reference's.

    The gate generates with the model `tutor` on a CPU in one process: once with the options ``reference``, and twice
    with the student's plugin, the second time with a warm prefix cache. All greedy tokens must be equal. ``words`` are
    options for both engines.
    """

    def run(student: Student) -> str:
        common = ["num_pages=256", *words]
        params = SamplingParams(max_tokens=24, temperature=0.0)
        (expected,) = generate([*common, *reference], _PROMPTS, params, 1)
        mine = [*common, f"plugins={student.path}", *student.lab.words]
        turns = student.run(generate, mine, _PROMPTS, params, 2)
        if len(turns) != 2:
            raise Broken("transcript", "Both turns are answered.", f"{len(turns)} turns came back.")
        for turn, answers in enumerate(turns):
            for prompt, answer, right in zip(_PROMPTS, answers, expected, strict=True):
                if answer == right:
                    continue
                at = next((i for i, (a, b) in enumerate(zip(answer, right, strict=False)) if a != b), len(answer))
                seen = (
                    f"Token {at} of the answer to {_short(prompt)!r} differs from the answer with {' '.join(reference)}"
                    f"{', when the same prompt is sent a second time' if turn else ''}."
                )
                raise Broken("promise", "Greedy answers do not depend on the plugin.", seen)
        return f"{2 * len(_PROMPTS)} answers equal those with {' '.join(reference)}"

    return Gate("engine", "tutor's greedy answers do not change with the plugin", run, limit=limit, transcript=True)


def _short(text: str) -> str:
    return re.sub(r"\s+", " ", text)[-50:]
