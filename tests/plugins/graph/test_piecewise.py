"""Attention between the recorded pieces of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.plugins.graph.replaying import piecewise
from minisgl.plugins.graph.replaying.piecewise import PiecewiseAttention


@pytest.mark.parametrize("recorded_zeros", [0, 1024])
@pytest.mark.parametrize("tokens", [0, 3, 5])
def test_padding_becomes_zero(tokens: int, recorded_zeros: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention gets the step's tokens only; the other rows become zero, in small and in large buckets."""
    monkeypatch.setattr(piecewise, "MAX_RECORDED_ZEROS", recorded_zeros)
    calls: list[int] = []

    def forward(layer: Any, q: Tensor, out: Tensor) -> Tensor:
        calls.append(len(q))
        return out.copy_(q)

    attention = PiecewiseAttention(SimpleNamespace(forward=forward))
    layer: Any = None
    q, out = torch.ones(5, 2, 4), torch.full((5, 2, 4), torch.nan)
    with attention.in_bucket(tokens):
        attention.forward(layer, q, out)
    assert calls == [tokens] * (tokens > 0)
    assert torch.equal(out[:tokens], q[:tokens])
    assert out[tokens:].eq(0).all()
    assert attention.forward(layer, q, out) is out  # outside a bucket, every row is a token
    assert out.eq(1).all()
