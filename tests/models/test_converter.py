"""Conversion of a model: the group `kernels`, modules that a plugin replaced, and an engine without any kernel."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from minisgl import LLM, SamplingParams
from minisgl.layers import GatedMLP, LinearRowParallel, RMSNormFused
from minisgl.models.converter import convert
from minisgl.models.decoder import DecoderLayers
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.kernels.converted.cpu_layers import CpuDecoderLayers
from minisgl.plugins.kernels.converted.layers import CLASSES, FastMLP, FastRowParallel
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.paged import PagedModel

PROMPTS = ["What is a radix cache?", "Hi", "What is paged attention? " * 20]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


class Doubled(GatedMLP):
    """An MLP of a plugin, which computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    return PluginManager.load()


def test_a_converted_layer_keeps_its_weights(tmp_path: Path, manager: PluginManager) -> None:
    """Names, parameters and the shards of a checkpoint are those of the plain model."""
    path = tiny_checkpoint("qwen3", tmp_path)
    plain, fast = (PagedModel(path, kernels=name, manager=manager).model for name in ("torch", "cpp"))
    assert isinstance(plain, nn.Module) and isinstance(fast, nn.Module)
    kinds = [(type(a), type(b)) for a, b in zip(plain.modules(), fast.modules(), strict=True)]
    assert (GatedMLP, FastMLP) in kinds and (LinearRowParallel, FastRowParallel) in kinds
    classes = CLASSES | {DecoderLayers: CpuDecoderLayers}
    assert all(b is classes.get(a, a) for a, b in kinds)
    stored, converted = plain.state_dict(), fast.state_dict()
    assert stored.keys() == converted.keys()
    assert all(torch.equal(stored[name], converted[name]) for name in stored)
    names = [[shard.name for shard in model.weight_shards("", None)] for model in (plain, fast)]  # type: ignore[operator]
    assert names[0] == names[1]


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "llama"])
def test_logits(architecture: str, tmp_path: Path, manager: PluginManager) -> None:
    """The kernels compute what the plain layers compute, but for rounding."""
    path, ids = tiny_checkpoint(architecture, tmp_path), torch.arange(3, 40)
    results = [PagedModel(path, kernels=name, manager=manager).run([(0, 0, ids)])[0] for name in ("torch", "cpp")]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_a_plugins_own_layer_is_left_as_it_is() -> None:
    model = nn.ModuleDict({"own": nn.Module(), "plain": nn.Module()})
    model["own"].__class__ = Doubled
    model["plain"].__class__ = GatedMLP
    convert(model, CLASSES)
    assert type(model["own"]) is Doubled
    assert type(model["plain"]) is FastMLP


def test_replaced_layer_decides(tmp_path: Path, manager: PluginManager) -> None:
    """A model whose plugin replaced the MLP gives the same with and without kernels."""
    path, ids = tiny_checkpoint("qwen3", tmp_path), torch.arange(3, 20)
    base = manager.models()["Qwen3ForCausalLM"]

    class Own(base):  # type: ignore[misc, valid-type]
        def mlp(self, index: int, **options: object) -> nn.Module:
            c = self.config
            return Doubled(c.hidden_size, c.intermediate_size, c.hidden_act, self.ctx)

    def logits(kernels: str) -> Tensor:
        model = PagedModel(path, kernels=kernels, manager=manager, model=Own)
        assert {type(layer.mlp) for layer in model.model.layers} == {Doubled}  # type: ignore[attr-defined]
        return model.run([(0, 0, ids)])[0]

    torch.testing.assert_close(logits("torch"), logits("cpp"), rtol=1e-4, atol=1e-4)


def test_a_model_without_kernels_has_only_plain_layers(tmp_path: Path, manager: PluginManager) -> None:
    model = PagedModel(tiny_checkpoint("qwen3", tmp_path), kernels="torch", manager=manager).model
    assert isinstance(model, nn.Module)
    assert any(type(module) is RMSNormFused for module in model.modules())
    assert not any("minisgl.plugins.kernels" in type(module).__module__ for module in model.modules())


def answers(*words: str) -> list[list[int]]:
    with LLM("tutor", overrides=["device=cpu", *words]) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, GREEDY, progress=False)]


def test_torch_gives_the_same_tokens() -> None:
    assert answers("kernels=torch") == answers()


def test_kernels_that_do_not_fit_the_device_are_refused() -> None:
    with pytest.raises(ValueError, match=r"kernels=triton: these kernels compute on a GPU.*use kernels=cpp"):
        answers("kernels=triton")


WITHOUT_KERNELS = """
import json, sys


class NoKernels:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("minisgl.plugins.kernels"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, NoKernels())
from minisgl import LLM, SamplingParams

prompts = json.loads(sys.argv[1])
greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
found = []
for model in ("tutor", "tutor-moe"):
    with LLM(model, overrides=["device=cpu", "attention=torch", "graph=none"]) as llm:
        found.append([output.token_ids for output in llm.generate(prompts, greedy, progress=False)])
assert not any(name.startswith("minisgl.plugins.kernels.") for name in sys.modules)
print(json.dumps(found))
"""


def test_without_the_folder_of_kernels() -> None:
    """A dense model and one with experts give the same tokens if ``plugins/kernels`` was deleted."""
    command = [sys.executable, "-c", WITHOUT_KERNELS, json.dumps(PROMPTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    expected = []
    for model in ("tutor", "tutor-moe"):
        with LLM(model, overrides=["device=cpu"]) as llm:
            expected.append([output.token_ids for output in llm.generate(PROMPTS, GREEDY, progress=False)])
    assert json.loads(done.stdout.splitlines()[-1]) == expected
