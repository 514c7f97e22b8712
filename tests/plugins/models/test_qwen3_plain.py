"""``architecture=Qwen3Plain`` computes the same as Qwen3, with two all-reduces per decoder layer between ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from minisgl import LLM, SamplingParams
from minisgl.config import ConfigError
from minisgl.distributed import Communicator
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.models.qwen3 import Qwen3ForCausalLM
from minisgl.plugins.models.qwen3_plain import Qwen3Plain
from minisgl.testing.model import CountingCommunicator, ModelConformance
from minisgl.testing.paged import PagedModel
from minisgl.testing.ranks import run_ranks


class TestQwen3Plain(ModelConformance):
    architecture = "qwen3"

    def make(self) -> type:
        """Return the model class to test."""
        return Qwen3Plain


def test_defaults() -> None:
    """Both classes of Qwen3 read config.json alike."""
    assert Qwen3Plain.defaults == Qwen3ForCausalLM.defaults


@pytest.mark.parametrize("size", [2, 4])
def test_communication(size: int, tmp_path: Path) -> None:
    """Each layer all-reduces its tokens' hidden states twice, and there is no other communication in it."""
    path = TestQwen3Plain().checkpoint(tmp_path)
    manager, tokens = PluginManager.load(), 9

    def work(comm: Communicator) -> CountingCommunicator:
        exchanged = CountingCommunicator(comm)
        model = PagedModel(path, comm=exchanged, model=Qwen3Plain, manager=manager)
        model.run([(0, 0, list(range(tokens)))])
        return exchanged

    for exchanged in run_ranks(size, work):
        layers, hidden = 2, 64
        # One more all-reduce after the embedding, and an all-gather of the logits at the end.
        assert Counter(exchanged.calls) == {"all_reduce": 2 * layers + 1, "all_gather": 1}
        assert exchanged.bytes["all_reduce"] == (2 * layers + 1) * tokens * hidden * 4


def test_tutor() -> None:
    """The engine generates the same tokens with Qwen3Plain as with Qwen3."""
    params = SamplingParams(max_tokens=8, temperature=0.0)
    prompts = ["What is 17 + 25?", "What is a radix cache?"]
    with LLM("tutor", overrides=["device=cpu"]) as llm:
        want = [output.token_ids for output in llm.generate(prompts, params)]
    with LLM("tutor", overrides=["device=cpu", "architecture=Qwen3Plain"]) as llm:
        assert isinstance(llm.engine.model, Qwen3Plain)  # type: ignore[union-attr]
        assert [output.token_ids for output in llm.generate(prompts, params)] == want


def test_unknown_architecture() -> None:
    message = r"architecture=Qwen3Plane: no plugin has a model class of that name. Did you mean Qwen3Plain\? Known: .*L"
    with pytest.raises(ConfigError, match=message):
        LLM("tutor", overrides=["device=cpu", "architecture=Qwen3Plane"])
