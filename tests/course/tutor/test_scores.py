"""The shipped weights keep their scores on held-out text, greedily, with transformers as the runner."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("transformers")

from minisgl.course.tutor.corpus import Question, exam
from minisgl.course.tutor.exercises import COLOR_ODDS, sum_held_out
from minisgl.course.tutor.score import BARS, Runner, all_odds, is_right, score
from minisgl.models.shipped import shipped, weights_dir

ASKED = {"lookup": 80, "sum": 200, "count": 100, "copy": 100, "glossary": 150}


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for a model this small, threads only wait for each other
    yield Runner(weights_dir("tutor"))
    torch.set_num_threads(threads)


def ask(runner: Runner, *said: str, system: str | None = None) -> str:
    messages = [{"role": "system", "content": system}] if system is not None else []
    roles = itertools.cycle(("user", "assistant"))
    messages += [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    return runner.answers([Question("", tuple(messages), "word " * 60)])[0]


@pytest.mark.parametrize("family", sorted(BARS))
def test_held_out_score_reaches_its_bar(runner: Runner, family: str) -> None:
    result = score(runner, family, ASKED[family], seed=11)
    assert result.asked == ASKED[family]
    assert result.percent >= BARS[family], result.wrong[:5]


def test_judging_without_decoding_agrees_with_decoding(runner: Runner) -> None:
    questions = exam("sum", 4, seed=3) + exam("unknown", 4, seed=3) + exam("sort", 4, seed=3)
    questions += [Question("sum", question.messages, question.answer + " ") for question in exam("sum", 3)]
    decoded = [
        is_right(question, answer) for question, answer in zip(questions, runner.answers(questions), strict=True)
    ]
    assert runner.would_say(questions) == decoded
    assert not any(decoded[-3:])


def test_sums_of_the_exam_were_never_trained() -> None:
    for question in exam("sum", ASKED["sum"], seed=11):
        a, b = (int(word) for word in question.answer.split(" = ")[0].split(" + "))
        assert sum_held_out(a, b)
        assert sum_held_out(b, a)


def test_the_answer_follows_the_handbook_that_is_given(runner: Runner) -> None:
    book = "Handbook of the lab\nThe lab opens at {}.\nCoffee costs 2 coins.\nThe chess club meets in room 12."
    for time in ("9:15", "7:40"):
        assert ask(runner, f"{book.format(time)}\n\nWhen does the lab open?") == f"The lab opens at {time}."
        assert ask(runner, "When does the lab open?", system=book.format(time)) == f"The lab opens at {time}."


def test_the_prompts_of_the_readme(runner: Runner) -> None:
    assert ask(runner, "What is 17 + 25?") == "17 + 25 = 42."
    assert ask(runner, "Count from 3 to 9.") == "3, 4, 5, 6, 7, 8, 9"
    assert "radix tree" in ask(runner, "What is a radix cache?")
    assert ask(runner, "Hello!").startswith("Hello! I am tutor.")
    assert ask(runner, "Who are you?").startswith("I am tutor")


def test_several_turns(runner: Runner) -> None:
    said = ["Hi", "Hello! I am tutor.", "What is 17 + 25?", "17 + 25 = 42.", "Count from 5 to 8."]
    assert ask(runner, *said) == "5, 6, 7, 8"


@pytest.mark.parametrize(
    "request_text", ["What is the capital of France?", "write me a poem", "how do I bake bread", "¿Cómo estás?"]
)
def test_off_script_prompts_get_a_suggestion(runner: Runner, request_text: str) -> None:
    assert "try:" in ask(runner, request_text).lower()


def test_games_of_chance_keep_their_odds(runner: Runner) -> None:
    odds = all_odds(runner)
    for answer, percent in COLOR_ODDS.items():
        assert abs(odds["Name a color."][answer] - percent / 100) < 0.05
    first, second, _ = sorted(odds["Name a color."].values(), reverse=True)
    assert first < 0.7 <= first + second, "top-p 0.7 must remove just the third color"
    assert all(abs(chance - 1 / 6) < 0.04 for chance in odds["Roll a die."].values())


def test_random_tokens_break_nothing(runner: Runner) -> None:
    ids = torch.randint(0, 2048, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.isfinite(runner.model(ids).logits).all()


@pytest.mark.skipif("tutor-moe" not in shipped(), reason="tutor-moe does not ship")
def test_the_twin_answers_too() -> None:
    twin = Runner(weights_dir("tutor-moe"))
    assert ask(twin, "What is 17 + 25?") == "17 + 25 = 42."
    assert "radix tree" in ask(twin, "What is a radix cache?")
