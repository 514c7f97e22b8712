"""The `Context`: communicator, attention and MoE backends, device, dtype and KV pool of one engine.

The engine builds one context and passes it to every layer's constructor. Two engines in one process have two contexts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from minisgl.attention import AttentionBackend
from minisgl.distributed import Communicator
from minisgl.kvcache.pool import KVPool
from minisgl.moe import MoeBackend


@dataclass
class Context:
    """The objects that all layers of one engine share.

    The engine sets ``pool`` after the weights are loaded and before the first forward pass.
    """

    comm: Communicator
    attention: AttentionBackend
    moe: MoeBackend | None  # None: the model has no experts
    device: torch.device
    dtype: torch.dtype
    pool: KVPool | None = None
    weights: torch.device | None = None
    """Where `parameter` allocates, if not on ``device``: torch's meta device, which has no memory, if a converter gives
    the layers other weights before they are loaded."""

    def parameter(self, *shape: int) -> nn.Parameter:
        """Return an uninitialised weight of ``shape``, which is not trained."""
        weight = torch.empty(shape, dtype=self.dtype, device=self.weights or self.device)
        return nn.Parameter(weight, requires_grad=False)
