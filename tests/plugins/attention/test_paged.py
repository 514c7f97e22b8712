"""Tests of attention=paged: results against dense attention in float64, and its counts of positions read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minisgl import LLM, SamplingParams
from minisgl.core import Step
from minisgl.plugins.attention.paged import PagedAttention
from minisgl.testing.attention import CASES, AttentionConformance, run_case


class TestPaged(AttentionConformance):
    """The attention kit applied to `PagedAttention`."""

    def make(self) -> PagedAttention:
        return PagedAttention()


def test_counts() -> None:
    """``positions_read`` is the sum of the rows' lengths; ``positions_padded`` is the longest length times the rows."""
    backend = PagedAttention()
    run_case(backend, replace(CASES[0], rows=((1000, 1), (3, 1), (20, 1), (0, 40))))
    assert backend.positions_read == 1001 + 4 + 21 + 40
    assert backend.positions_padded == 4 * 1001


def test_in_the_engine() -> None:
    """attention=paged gives the tokens of attention=torch; each layer reads the positions of each row once per step."""
    prompts = ["Count from 5 to 9.", "What is a radix cache?", "Count from 5 to 30.", "What is 12 + 30?"]
    params = SamplingParams(max_tokens=12, temperature=0.0)
    words = ["device=cpu", "graph=none", "page_size=16", "max_prefill_tokens=24"]
    with LLM("tutor", overrides=[*words, "attention=torch"]) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, params)]
    with LLM("tutor", overrides=[*words, "attention=paged"]) as llm:
        lengths: list[int] = []
        engine: Any = llm.engine
        launch = engine.launch

        def counted_launch(step: Step) -> None:
            lengths.extend((step.num_computed_tokens + step.num_scheduled_tokens).tolist())
            launch(step)

        engine.launch = counted_launch
        assert [output.token_ids for output in llm.generate(prompts, params)] == expected
        backend = engine.attention
        assert backend.positions_read == 6 * sum(lengths)
        assert backend.positions_padded > backend.positions_read
        metrics = "".join(llm.plugin_manager.hook.minisgl_metrics())
        assert f"minisgl_paged_positions_read_total {6 * sum(lengths)}\n" in metrics
