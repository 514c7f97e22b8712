"""The shipped weights reach the required scores on held-out text, with greedy decoding in transformers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("transformers")

from minisgl.chapters.tutor.corpus import Question, exam
from minisgl.chapters.tutor.exercises import COLOR_ODDS, sum_held_out
from minisgl.chapters.tutor.score import BARS, Runner, all_odds, is_right, score
from minisgl.models.shipped import shipped, weights_dir

ASKED = {"lookup": 80, "sum": 200, "count": 100, "copy": 100, "glossary": 150, "call": 25, "result": 25, "no_call": 25}


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    """Load the shipped `tutor`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for a model this small, several threads are slower than one
    yield Runner(weights_dir("tutor"))
    torch.set_num_threads(threads)


def ask(runner: Runner, *said: str, system: str | None = None) -> str:
    """Return the greedy answer to a conversation. ``said`` are the messages, beginning with the user's."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    roles = itertools.cycle(("user", "assistant"))
    messages += [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    return runner.answers([Question("", tuple(messages), "word " * 60)])[0]


@pytest.mark.parametrize("family", sorted(BARS))
def test_score(runner: Runner, family: str) -> None:
    """The share of right answers to held-out questions reaches the required percentage of the family."""
    result = score(runner, family, ASKED[family], seed=11)
    assert result.asked == ASKED[family]
    assert result.percent >= BARS[family], result.wrong[:5]


def test_would_say(runner: Runner) -> None:
    """`Runner.would_say` agrees with greedy decoding on right and on wrong answers."""
    questions = exam("sum", 4, seed=3) + exam("unknown", 4, seed=3) + exam("sort", 4, seed=3)
    questions += [Question("sum", question.messages, question.answer + " ") for question in exam("sum", 3)]
    decoded = [
        is_right(question, answer) for question, answer in zip(questions, runner.answers(questions), strict=True)
    ]
    assert runner.would_say(questions) == decoded
    assert not any(decoded[-3:])


def test_exam_sums() -> None:
    """The sums of the exam are held out in both orders of the summands."""
    for question in exam("sum", ASKED["sum"], seed=11):
        a, b = (int(word) for word in question.answer.split(" = ")[0].split(" + "))
        assert sum_held_out(a, b)
        assert sum_held_out(b, a)


def test_handbook_lookup(runner: Runner) -> None:
    """The answer follows the handbook in the prompt, both in the user message and in the system message."""
    book = "Handbook of the lab\nThe lab opens at {}.\nCoffee costs 2 coins.\nThe chess club meets in room 12."
    for time in ("9:15", "7:40"):
        assert ask(runner, f"{book.format(time)}\n\nWhen does the lab open?") == f"The lab opens at {time}."
        assert ask(runner, "When does the lab open?", system=book.format(time)) == f"The lab opens at {time}."


def test_readme_prompts(runner: Runner) -> None:
    """The example prompts of the README get the answers that the README shows."""
    assert ask(runner, "What is 17 + 25?") == "17 + 25 = 42."
    assert ask(runner, "Count from 3 to 9.") == "3, 4, 5, 6, 7, 8, 9"
    assert "radix tree" in ask(runner, "What is a radix cache?")
    assert ask(runner, "Hello!").startswith("Hello! I am tutor.")
    assert ask(runner, "Who are you?").startswith("I am tutor")


def test_several_turns(runner: Runner) -> None:
    """The model answers the last message of a conversation with several turns."""
    said = ["Hi", "Hello! I am tutor.", "What is 17 + 25?", "17 + 25 = 42.", "Count from 5 to 8."]
    assert ask(runner, *said) == "5, 6, 7, 8"


@pytest.mark.parametrize(
    "request_text", ["What is the capital of France?", "write me a poem", "how do I bake bread", "¿Cómo estás?"]
)
def test_off_script(runner: Runner, request_text: str) -> None:
    """A request that the model cannot serve gets an answer that suggests another request."""
    assert "try:" in ask(runner, request_text).lower()


def test_odds(runner: Runner) -> None:
    """The probabilities of colors and of a die's faces are those of the training text."""
    odds = all_odds(runner)
    for answer, percent in COLOR_ODDS.items():
        assert abs(odds["Name a color."][answer] - percent / 100) < 0.05
    first, second, _ = sorted(odds["Name a color."].values(), reverse=True)
    assert first < 0.7 <= first + second, "top-p 0.7 must remove just the third color"
    assert all(abs(chance - 1 / 6) < 0.04 for chance in odds["Roll a die."].values())


def test_random_tokens(runner: Runner) -> None:
    """The logits of random tokens are finite."""
    ids = torch.randint(0, 2048, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.isfinite(runner.model(ids).logits).all()


def test_tutor_hybrid() -> None:
    """`tutor-hybrid` reaches the bars, as far as a few questions of each family show it."""
    hybrid = Runner(weights_dir("tutor-hybrid"))
    assert "radix tree" in ask(hybrid, "What is a radix cache?")
    few = {"lookup": 3, "sum": 8, "count": 3, "copy": 3, "glossary": 4, "call": 2, "result": 2, "no_call": 2}
    scores = [score(hybrid, family, size, seed=11) for family, size in few.items()]
    assert set(few) == set(BARS)
    for result in scores:  # one wrong answer more than the bar allows
        assert result.asked - result.right <= 1 + result.asked * (1 - BARS[result.family] / 100), result.wrong


@pytest.mark.skipif("tutor-moe" not in shipped(), reason="tutor-moe does not ship")
def test_tutor_moe() -> None:
    """`tutor-moe` answers a sum and a glossary question correctly."""
    mixture = Runner(weights_dir("tutor-moe"))
    assert ask(mixture, "What is 17 + 25?") == "17 + 25 = 42."
    assert "radix tree" in ask(mixture, "What is a radix cache?")
