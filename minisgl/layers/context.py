"""The `Context`: communicator, attention and MoE backends, device, dtype and KV pool of one engine.

The engine builds one context and passes it to every layer's constructor. Two engines in one process have two contexts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl.attention import AttentionBackend
from minisgl.distributed import Communicator
from minisgl.kvcache.pool import KVPool
from minisgl.layers.fp8 import Fp8
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
    fp8: Fp8 | None = None  # None: linear layers have weights of ``dtype``
    pool: KVPool | None = None
