"""How often drafts are right on `tutor`'s own text: those of `tutor-draft` by position, those of `ngram` by step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from minisgl import LLM, SamplingParams
from minisgl.chapters.tutor.corpus import EXAMS, exam

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


@dataclass(frozen=True)
class Counts:
    """Answers, and the counts of the engine that computed them one after the other."""

    answers: list[list[int]]
    steps: int
    decode_rows: int
    drafts: int

    @property
    def tokens_a_step(self) -> float:
        """Tokens of a step, where the steps that compute prompts count too."""
        return sum(map(len, self.answers)) / self.steps

    @property
    def tokens_a_row(self) -> float:
        """Tokens of a decode row. The step that computes a prompt gives the first token of the answer."""
        return sum(len(answer) - 1 for answer in self.answers) / self.decode_rows


def answer(chats: list[list[dict[str, str]]], *options: str, adapt: bool = True) -> Counts:
    """Answer the chats one after the other, greedily."""
    with LLM("tutor", overrides=["device=cpu", "num_pages=1000", *options]) as llm:
        if (speculation := llm.scheduler.speculation) is not None:
            speculation.adapt = adapt
            # The choice between steps with and without drafts would follow this machine's clock.
            speculation._most_drafts = lambda _rows, counts: int(counts.max(initial=0))  # type: ignore[method-assign]
        answers = [llm.chat(chat, SamplingParams(max_tokens=200, temperature=0.0))[0].token_ids for chat in chats]
        stats = llm.scheduler.stats()
    return Counts(answers, stats["steps"], stats["decode_tokens"], stats["draft_tokens"])


@pytest.mark.parametrize(("family", "a_row", "a_step"), [("copy", 4.5, 3.9), ("lookup", 2.5, 2.2)])
def test_ngram(family: str, a_row: float, a_step: float) -> None:
    """With `ngram`, a decode row gives 4.5 tokens where `tutor` copies, and 2.5 where it looks up facts in a handbook.

    If the steps that compute prompts count too, a step gives 3.9 and 2.2 tokens. The step that is in flight when an
    answer ends counts too.
    """
    chats = [list(question.messages) for question in exam(family, 30, seed=5)]
    plain = answer(chats, "speculation=none")
    assert plain.tokens_a_step < 1 and plain.tokens_a_row < 1
    assert plain.drafts == 0
    with_drafts = answer(chats, "speculation=ngram")
    all_drafts = answer(chats, "speculation=ngram", "speculation.max_drafts=16", adapt=False)
    for name, counts in (("none", plain), ("ngram", with_drafts), ("16 drafts", all_drafts)):
        print(f"{family}, {name}: {counts.tokens_a_step:.2f} tokens a step, {counts.tokens_a_row:.2f} a decode row")
    assert with_drafts.answers == all_drafts.answers == plain.answers
    assert with_drafts.tokens_a_row >= a_row
    assert with_drafts.tokens_a_step >= a_step
    assert with_drafts.tokens_a_row >= 0.9 * all_drafts.tokens_a_row


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
