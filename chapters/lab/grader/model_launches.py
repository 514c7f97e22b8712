"""Counts the launches of a model on one of two ranks, if the communicator can sum, add and normalise in one launch."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.chapters.lab.grader.gate import Broken
from minisgl.chapters.lab.grader.launches import Launches
from minisgl.chapters.lab.grader.model_parts import RandomWeights, Shape, qwen3, run_ranks, shipped
from minisgl.plugins.kernels.ops.norm import add_rms_norm
from minisgl.testing.paged import PagedModel
from minisgl.utils.launch import one_launch

__all__ = ["LAYERS", "launches_of_a_model"]

LAYERS = 4
_SHAPE = Shape(ranks=2, q_heads=4, kv_heads=2, head_dim=6, inner=20, tokens=3, layers=LAYERS)
"""No size is a multiple of 16, so all machines run the same code of `minisgl.plugins.kernels`: not the C++ of some."""


class _Fusing:
    """A rank's communicator with a fused `all_reduce_norm`, as between GPUs."""

    def __init__(self, comm: Any):
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    @one_launch
    def all_reduce_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(self._comm.all_reduce(x), residual, weight, eps)


def launches_of_a_model(kind: Any) -> int:
    """Return the launches on a rank while a model of the class ``kind`` computes the hidden states of 3 tokens.

    A norm is one launch, and so are QK-norm, RoPE and the KV store together, as on a GPU. Raise `Broken` if the logits
    are wrong.
    """

    def work(comm: Any) -> tuple[int, Tensor]:
        return _run(kind, _Fusing(comm))

    with patch.object(F, "rms_norm", one_launch(F.rms_norm)):
        ranks, _ = run_ranks(_SHAPE.ranks, work, nan=False)
        ((_, want),), _ = run_ranks(1, lambda comm: _run(qwen3(), comm))
    for rank, (_, logits) in enumerate(ranks):
        if not torch.allclose(logits, want, atol=2e-2):
            promise = f"The model computes the same logits on {_SHAPE.ranks} ranks as Qwen3 on one rank."
            raise Broken("parts", promise, f"The logits on rank {rank} are wrong.")
    most: int = max(number for number, _ in ranks)
    return most


def _run(kind: Any, comm: Any) -> tuple[int, Tensor]:
    """Compute 3 tokens on one rank. Return the launches of the model's forward pass, and the logits."""
    model = PagedModel(_SHAPE.config, comm=comm, model=kind, manager=shipped(), source=RandomWeights())
    stored = one_launch(model.attention.norm_rope_store)
    forward, launches = model.model.forward, Launches()

    def counted(*args: Any) -> Tensor:
        with launches:
            return forward(*args)

    with patch.object(model.model, "forward", counted), patch.object(model.attention, "norm_rope_store", stored):
        (logits,) = model.run([(0, 0, torch.arange(7, 7 + _SHAPE.tokens))])
    return launches.number, logits
