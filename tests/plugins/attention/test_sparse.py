"""Tests of attention=sparse, with attention=torch for prefill, against dense attention in float64."""

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
def test_equals_dense_attention(case: AttentionCase) -> None:
    """attention=sparse equals dense attention in the float32 cases of the attention kit."""
    got, want = run_case(backend(), case)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("window", [-1, 1, 40])
def test_rows_of_very_different_lengths(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """attention=sparse is right for rows in many groups, with and without padding, and for several calls per length."""
    rows = tuple((n, 1) for n in (900, 5, 0, 17, 901, 300, 290, 17, 17, 17, 250, 1, 0))
    for max_scores in (1, 4 * 600, 1 << 22):
        for max_padding in (0, 1000, 1 << 22):
            monkeypatch.setattr(sparse, "MAX_SCORES", max_scores)
            monkeypatch.setattr(sparse, "MAX_PADDING", max_padding)
            got, want = run_case(backend(), AttentionCase(rows, page_size=4, window=window))
            torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)


def test_padding_is_bounded() -> None:
    """attention=sparse groups rows of similar length; no group has more than ``MAX_PADDING`` padding scores."""
    made = backend()
    run_case(made, replace(CASES[0], rows=((1000, 1), *[(20 + 7 * i, 1) for i in range(60)])))
    groups = made.plans[-1].groups
    padding = [int(group.padding.sum()) for group in groups if group.padding is not None]
    assert 0 < max(padding) <= sparse.MAX_PADDING
    assert 1 < len(groups) < 10


def test_needs() -> None:
    """attention=sparse needs a float32 KV pool and a CPU; on a GPU it is refused with a message."""
    assert backend().needs().kv_dtypes == (torch.float32,)
    assert backend().needs().refuse == ""
    assert "it runs on CPUs only" in backend(torch.device("cuda")).needs().refuse


def test_plugin() -> None:
    """attention=sparse builds this backend. tests/plugins/attention/test_cpp.py has the choice of attention=auto."""
    manager = PluginManager.load()
    assert isinstance(manager.build("attention", manager.make("attention", "sparse"), device=CPU), SparseAttention)
