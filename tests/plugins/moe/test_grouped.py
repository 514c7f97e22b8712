"""``moe=grouped``: the conformance kit, transformers' experts, and the number of weights read and rows multiplied."""

from __future__ import annotations

import pytest
import torch

from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.moe import MoeBackend
from minisgl.plugins.moe.grouped import Grouped, GroupedMoe
from minisgl.testing.moe import MoeCase, MoeConformance, count, problem


class TestGrouped(MoeConformance):
    def make(self) -> MoeBackend:
        """Build the backend to test."""
        return GroupedMoe(block=16)


class TestGroupedWithoutPadding(MoeConformance):
    def make(self) -> MoeBackend:
        """Build the backend to test."""
        return GroupedMoe(block=1)


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("case", [MoeCase(1), MoeCase(50), MoeCase(50, chosen=(1, 4)), MoeCase(3, experts=64)], ids=str)
def test_weights_read(case: MoeCase, block: int) -> None:
    """Only chosen experts are read, with two products each, on rows padded to whole blocks."""
    given = problem(case)
    chosen = torch.bincount(given.ids.flatten(), minlength=case.experts)
    active = int((chosen > 0).sum())
    counts = count(GroupedMoe(block), given)
    assert counts.experts == active
    assert counts.gemms == 2 * active
    assert counts.rows == int((-(-chosen // block) * block).sum())


def test_count() -> None:
    """`count` counts repeated reads: a product per pair, and a gather of weights per pair, read an expert per pair."""
    given = problem(MoeCase(10))

    class ByPair(GroupedMoe):
        def forward(self, weights, x, ids, scale, out):  # type: ignore[no-untyped-def]
            for pair, expert in enumerate(ids.flatten().tolist()):
                torch.nn.functional.linear(x[pair // 2], weights.gate_up[expert])
            weights.down[ids.flatten().long()]
            return out

    assert count(ByPair(1), given).experts == 20


def test_agrees_with_transformers() -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    given = problem(MoeCase(40, top_k=3))
    config = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=24, num_experts=6)
    config._experts_implementation = "eager"
    experts = Qwen3MoeExperts(config).double()
    with torch.no_grad():
        experts.gate_up_proj.copy_(given.gate_up)
        experts.down_proj.copy_(given.down)
        want = experts(given.x.double(), given.ids.long(), given.scale.double())
    torch.testing.assert_close(given.solve(GroupedMoe(16)).double(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(given.answer(), want, atol=1e-9, rtol=1e-9)


def test_block_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"moe\.block=0 must be at least 1"):
        Grouped(block=0)


def test_it_is_a_plugin() -> None:
    manager = PluginManager.load()
    assert isinstance(manager.build("moe", manager.make("moe", "grouped"), device=torch.device("cpu")), GroupedMoe)
