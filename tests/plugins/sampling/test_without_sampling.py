"""Without `plugins/sampling`, requests with its parameters are refused by name, and others are served."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl import LLM, SamplingParams
from minisgl.core import InvalidRequestError
from minisgl.plugin_manager.manager import PluginManager

PROCESSORS = ["SampledLogprobs", "LogitBias", "Penalties", "TopKP", "TopKP", "MinP"]
"""In the order in which they are applied. Min-p comes after top-k and top-p."""


def test_without_the_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the parameter and the plugin. A plain request gets the tokens that it gets with the plugins."""
    load = PluginManager.load_built_in

    def without(self: PluginManager, kind: str, name: str) -> bool:
        return kind != "sampling" and load(self, kind, name)

    plain = SamplingParams(max_tokens=4, temperature=0.8, seed=1, ignore_eos=True)
    given: dict[str, Any] = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
    given |= {"logit_bias": {3: 1.0}, "min_p": 0.1, "top_k": 5, "top_p": 0.9, "logprobs": 1, "prompt_logprobs": 2}
    options = ["device=cpu", "num_pages=64"]
    with LLM("tutor", overrides=options) as llm:
        assert [type(p).__name__ for p in llm.engine.model_runner.sampler.processors.values()] == PROCESSORS
        expected = llm.generate("How many legs", plain)
        for name, value in given.items():
            assert llm.generate("How many legs", SamplingParams(max_tokens=1, **{name: value}))
    monkeypatch.setattr(PluginManager, "load_built_in", without)
    with LLM("tutor", overrides=options) as llm:
        assert not llm.engine.model_runner.sampler.processors
        for name, value in given.items():
            with pytest.raises(InvalidRequestError, match=f"{name} needs the plugin plugins/sampling/") as refused:
                llm.generate("How many legs", SamplingParams(max_tokens=1, **{name: value}))
            assert refused.value.field == name
        assert llm.generate("How many legs", plain)[0].token_ids == expected[0].token_ids
