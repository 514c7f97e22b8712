"""Tests of attention=torch against dense attention in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.attention.torch import Torch, TorchAttention
from minisgl.testing.attention import CASES, AttentionCase, run_case

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
CPU = torch.device("cpu")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_dense_attention(case: AttentionCase) -> None:
    """attention=torch equals dense attention in all cases of the attention kit."""
    got, want = run_case(TorchAttention(Torch(), CPU), case)
    torch.testing.assert_close(got, want, atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype])


@pytest.mark.parametrize("gather_bytes", [1, 40_000])
@pytest.mark.parametrize("block", [1, 7, 64])
@pytest.mark.parametrize("window", [-1, 10])
def test_block_and_group_sizes(block: int, gather_bytes: int, window: int) -> None:
    """In attention=torch, the sizes of query blocks and of row groups do not change the result."""
    case = replace(CASES[0], page_size=4, window=window, rows=((90, 1), (80, 1), (9, 1), (0, 40), (3, 40), (70, 8)))
    backend = TorchAttention(Torch(block=block), CPU)
    backend.budget = gather_bytes
    got, want = run_case(backend, case)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)


def test_stored_scores_fit_the_budget() -> None:
    """The scores of layers with sinks or a soft cap, which are stored, are part of the budget of one call."""
    backend = TorchAttention(Torch(), CPU)
    case = replace(CASES[0], rows=tuple((0, 256) for _ in range(8)), soft_cap=5.0)
    got, want = run_case(backend, case)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)
    scores = [4 * case.q_heads * group.mask.numel() for group in backend.plans[case.window].groups]
    assert len(scores) > 1
    assert max(scores) <= backend.budget


def test_padding_is_bounded() -> None:
    """In attention=torch, at most half of the gathered KV is padding, even if one row is much longer than the rest."""
    backend = TorchAttention(Torch(), CPU)
    run_case(backend, replace(CASES[0], rows=((1000, 1), *[(20 + i, 1) for i in range(30)])))
    gathered = sum(group.mask[:, :, 0].numel() for group in backend.plans[-1].groups)
    needed = sum(int(group.mask.sum()) for group in backend.plans[-1].groups)
    assert gathered < 2 * needed


def test_window_reads_only_its_pages() -> None:
    """In attention=torch, a layer with a sliding window gathers only the pages within the window."""
    backend = TorchAttention(Torch(), CPU)
    run_case(backend, AttentionCase(((1000, 1),), page_size=16, window=40))
    (group,) = backend.plans[40].groups
    assert len(group.pages) <= 4


def test_plugin() -> None:
    """The option attention=torch builds a `TorchAttention`."""
    manager = PluginManager.load()
    config = manager.make("attention", "torch")
    assert isinstance(manager.build("attention", config, device=CPU), TorchAttention)
