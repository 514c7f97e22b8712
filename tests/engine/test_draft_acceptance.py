"""How often drafts are right on `tutor`'s own text: `tutor-draft` by position, and `ngram` by step."""

from __future__ import annotations

from pathlib import Path

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
