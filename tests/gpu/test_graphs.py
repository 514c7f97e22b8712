"""CUDA graphs under the public kit: replays give what the forward pass gives, and padding touches the scratch page."""

from __future__ import annotations

import pytest
import torch

from minisgl.plugins.graph.cuda import CudaGraph, CudaGraphRunner
from minisgl.plugins.graph.replay import Replay, ReplayRunner
from minisgl.testing.graph import GraphConformance

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = torch.device("cuda")


class TestCuda(GraphConformance):
    device = CUDA

    def make(self) -> CudaGraphRunner:
        return CudaGraphRunner(CudaGraph(), CUDA)


class TestReplay(GraphConformance):
    device = CUDA

    def make(self) -> ReplayRunner:
        return ReplayRunner(Replay(), CUDA)
