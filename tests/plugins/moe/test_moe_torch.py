"""``moe=torch`` compared with transformers' expert layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.moe.torch import TorchMoe

HIDDEN, INNER, EXPERTS = 32, 24, 6


def weights(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random ``gate_up`` and ``down`` weights."""
    gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator) / HIDDEN**0.5
    return gate_up, torch.randn(EXPERTS, HIDDEN, INNER, generator=generator) / INNER**0.5


def reference(x: Tensor, ids: Tensor, scale: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Compute the experts with transformers, in float64."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS)
    config._experts_implementation = "eager"
    experts = Qwen3MoeExperts(config).double()
    with torch.no_grad():
        experts.gate_up_proj.copy_(gate_up)
        experts.down_proj.copy_(down)
        return experts(x.double(), ids.long(), scale.double())


@pytest.mark.parametrize("tokens", [1, 17, 200])
@pytest.mark.parametrize("top_k", [1, 3])
def test_agrees_with_transformers(tokens: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    gate_up, down = weights(generator)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    scale, ids = torch.rand(tokens, EXPERTS, generator=generator).topk(top_k)
    backend = TorchMoe()
    handle = backend.load(gate_up, down, range(EXPERTS), "silu")
    out = torch.full_like(x, float("nan"))
    got = backend.forward(handle, x, ids.int(), scale, out)
    assert got is out
    want = reference(x, ids, scale, gate_up, down)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_partial_sums_of_ranges_of_experts() -> None:
    """With a range of the experts the result is a partial sum; the sums of all ranges add up to the whole."""
    generator = torch.Generator().manual_seed(5)
    gate_up, down = weights(generator)
    x = torch.randn(40, HIDDEN, generator=generator)
    scale, ids = torch.rand(40, EXPERTS, generator=generator).topk(2)
    backend = TorchMoe()
    parts = []
    for experts in (range(2), range(2, 5), range(5, 6)):
        mine = slice(experts.start, experts.stop)
        handle = backend.load(gate_up[mine], down[mine], experts, "silu")
        parts.append(backend.forward(handle, x, ids.int(), scale, torch.empty_like(x)))
    want = reference(x, ids, scale, gate_up, down)
    torch.testing.assert_close(sum(parts).double(), want, atol=1e-5, rtol=1e-5)


def test_it_is_a_plugin() -> None:
    manager = PluginManager.load()
    assert isinstance(manager.build("moe", manager.make("moe", "torch"), device=torch.device("cpu")), TorchMoe)
