"""Runs of the model `tutor` in one process, for gates that compare answers. They return data, and judge nothing.

Under ``lab grade`` the functions in ``__all__`` run in the student's process, and the grader compares what they return.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minisgl.core import SamplingParams

__all__ = ["chat", "generate"]


def generate(
    overrides: Sequence[str], prompts: Sequence[str], params: SamplingParams, times: int
) -> list[list[list[int]]]:
    """Generate from all prompts at once, ``times`` times, on a CPU. Return the token ids: [times][prompts][tokens]."""
    from minisgl.llm import LLM

    with LLM("tutor", overrides=["device=cpu", *overrides]) as llm:
        return [
            [o.token_ids for o in llm.generate(list(prompts), params, progress=False)]  # type: ignore[arg-type]
            for _ in range(times)
        ]


def chat(
    overrides: Sequence[str], chats: Sequence[str], params: Sequence[SamplingParams]
) -> tuple[list[list[int]], dict[str, int]]:
    """Answer each chat of one message with each of ``params``, on a CPU.

    Return the token ids [params * chats][tokens], and the scheduler's counts of steps and drafts. With speculation, the
    number of drafts is fixed: the clock does not decide it.
    """
    from minisgl.llm import LLM

    asked = [[{"role": "user", "content": text}] for text in chats]
    with LLM("tutor", overrides=["device=cpu", *overrides]) as llm:
        if llm.scheduler.speculation is not None:
            llm.scheduler.speculation.adapt = False
        found = [o.token_ids for p in params for o in llm.chat(asked, p, progress=False)]
        stats: dict[str, Any] = llm.scheduler.stats()
    return found, {name: int(stats.get(name, 0)) for name in ("steps", "draft_tokens", "accepted_draft_tokens")}
