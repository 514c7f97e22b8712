"""Tests of graph=none: on a CPU, the core's own runner computes every step."""

from __future__ import annotations

from minisgl import LLM
from minisgl.engine.engine import TorchEngine
from minisgl.engine.model_runner import ModelRunner


def test_the_plain_runner_computes_the_steps() -> None:
    with LLM("tutor", overrides=["device=cpu", "num_pages=64", "graph=none"]) as llm:
        assert isinstance(llm.engine, TorchEngine)
        assert isinstance(llm.engine.runner, ModelRunner)
        assert len(llm.generate(["Hello"])[0].token_ids) > 0
