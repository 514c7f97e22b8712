"""The rowwise backend against dense attention in float64."""

from __future__ import annotations

import torch
from rowwise import Rowwise, RowwiseAttention

from minisgl.attention import AttentionBackend
from minisgl.testing.attention import AttentionConformance


class TestRowwise(AttentionConformance):
    def make(self) -> AttentionBackend:
        return RowwiseAttention(Rowwise())


class TestRowwiseInTheModelsDtype(AttentionConformance):
    def make(self) -> AttentionBackend:
        return RowwiseAttention(Rowwise(upcast=False))


if torch.cuda.is_available():

    class TestRowwiseOnAGpu(TestRowwise):
        device = "cuda"
