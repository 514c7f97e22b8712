"""How often drafts are right on `tutor`'s own text: those of `tutor-draft` by position, those of `ngram` by step."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from minisgl import LLM, SamplingParams
from minisgl.course.tutor.corpus import EXAMS, exam

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "add_a_draft_model" / "draft_model.py"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_draft_model(temperature: float) -> None:
    """`tutor-draft` guesses at least 60 % of the tokens of `tutor`'s answers right, after the tokens before them.

    With one draft in each step, no draft follows a wrong draft.
    """
    chats = [list(question.messages) for family in EXAMS for question in exam(family, 4, seed=5)]
    words = ["device=cpu", "num_pages=1000", f"plugins={EXAMPLE}", "speculation=draft_model"]
    with LLM("tutor", overrides=[*words, "speculation.max_drafts=1"]) as llm:
        llm.scheduler.speculation.adapt = False  # type: ignore[union-attr]
        llm.chat(chats, SamplingParams(max_tokens=80, temperature=temperature, seed=3))
        stats = llm.scheduler.stats()
    drafts, accepted = stats["draft_tokens"], stats["accepted_draft_tokens"]
    print(f"temperature {temperature}: {accepted} of {drafts} drafts accepted ({accepted / drafts:.0%})")
    assert drafts > 300
    assert accepted >= 0.6 * drafts


def tokens_per_step(name: str, chats: list[list[dict[str, str]]]) -> tuple[list[list[int]], float, int]:
    """Answer the chats one after the other. Return the answers, the tokens of a step, and the number of drafts."""
    with LLM("tutor", overrides=["device=cpu", "num_pages=1000", f"speculation={name}"]) as llm:
        speculation = llm.scheduler.speculation
        if (
            speculation is not None
        ):  # the choice between steps with and without drafts would follow this machine's clock
            speculation._most_drafts = lambda _rows, counts: int(counts.max(initial=0))  # type: ignore[method-assign]
        answers = [llm.chat(chat, SamplingParams(max_tokens=200, temperature=0.0))[0].token_ids for chat in chats]
        stats = llm.scheduler.stats()
    return answers, sum(map(len, answers)) / stats["steps"], stats["draft_tokens"]


@pytest.mark.parametrize(("family", "plain", "drafted"), [("copy", 1.0, 2.5), ("lookup", 1.0, 1.3)])
def test_ngram(family: str, plain: float, drafted: float) -> None:
    """`ngram` gives 2.5 tokens a step where `tutor` copies, and 1.3 where it answers in its own words from a handbook.

    The steps that compute prompts are counted too, and the steps that are in flight when an answer ends.
    """
    chats = [list(question.messages) for question in exam(family, 30, seed=5)]
    expected, without, drafts = tokens_per_step("none", chats)
    assert without < plain
    assert drafts == 0
    answers, with_drafts, drafts = tokens_per_step("ngram", chats)
    print(f"{family}: {without:.2f} tokens a step without drafts, {with_drafts:.2f} with {drafts} drafts")
    assert answers == expected
    assert with_drafts >= drafted


def test_random_text() -> None:
    """Random prompts and answers repeat no three tokens: `ngram` drafts nothing."""
    rng = Random(1)
    prompts = [rng.sample(range(3, 2048), 300) for _ in range(4)]
    with LLM("tutor", overrides=["device=cpu", "num_pages=200", "speculation=ngram"]) as llm:
        # `tutor` is sampled at such a temperature that its answers are random too.
        llm.generate(prompts, SamplingParams(max_tokens=60, temperature=100.0, ignore_eos=True))
        stats = llm.scheduler.stats()
    assert stats["draft_tokens"] == 0
    assert stats["decode_tokens"] > 200
