"""The graph runners ``cuda`` and ``replay`` under the conformance kit for graph runners.

A replay must compute the same as the forward pass, and padding rows may write to the scratch page only.
"""

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
        """Build the graph runner to test."""
        return CudaGraphRunner(CudaGraph(), CUDA)


class TestReplay(GraphConformance):
    device = CUDA

    def make(self) -> ReplayRunner:
        """Build the graph runner to test."""
        return ReplayRunner(Replay(), CUDA)
