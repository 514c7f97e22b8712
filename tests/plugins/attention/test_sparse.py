"""attention=sparse against dense attention in float64, and what it shares with torch, to which it gives prefill."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.attention import sparse
from minisgl.plugins.attention.sparse import SparseAttention
from minisgl.plugins.attention.torch import Torch, TorchAttention
from minisgl.testing.attention import CASES, AttentionCase, run_case

CPU = torch.device("cpu")


def backend(device: torch.device = CPU) -> SparseAttention:
    return SparseAttention(TorchAttention(Torch(), device), device)


@pytest.mark.parametrize("case", [case for case in CASES if case.dtype == torch.float32], ids=str)
def test_agrees_with_dense_attention(case: AttentionCase) -> None:
    got, want = run_case(backend(), case)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("window", [-1, 1, 40])
def test_rows_of_very_different_lengths(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many groups, with padding and without, and more than one call for equal lengths."""
    rows = tuple((n, 1) for n in (900, 5, 0, 17, 901, 300, 290, 17, 17, 17, 250, 1, 0))
    for most in (1, 4 * 600, 1 << 22):
        for padding in (0, 1000, 1 << 22):
            monkeypatch.setattr(sparse, "MOST", most)
            monkeypatch.setattr(sparse, "PADDING", padding)
            got, want = run_case(backend(), AttentionCase(rows, page_size=4, window=window))
            torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)


def test_padding_costs_no_more_than_the_calls_it_saves() -> None:
    made = backend()
    run_case(made, replace(CASES[0], rows=((1000, 1), *[(20 + 7 * i, 1) for i in range(60)])))
    groups = made.plans[-1].groups
    padding = [int(group.padding.sum()) for group in groups if group.padding is not None]
    assert 0 < max(padding) <= sparse.PADDING
    assert 1 < len(groups) < 10


def test_what_it_needs_and_refuses() -> None:
    assert backend().needs().kv_dtypes == (torch.float32,)
    assert backend().needs().refuse == ""
    assert "it is for CPUs" in backend(torch.device("cuda")).needs().refuse


def test_it_is_a_plugin_and_what_auto_takes_on_a_cpu() -> None:
    manager = PluginManager.load()
    assert isinstance(manager.build("attention", manager.make("attention", "sparse"), device=CPU), SparseAttention)
    auto = manager.build("attention", manager.make("attention", "auto"), device=CPU)
    run_case(auto, CASES[0])
    assert auto.chosen == "sparse"
    run_case(auto, replace(CASES[0], dtype=torch.bfloat16))
    assert auto.chosen == "torch"
