"""What every layer of one engine is built with: its rank's link, its attention and expert backends, its KV pool.

It belongs to the engine and is handed to each layer at construction; two engines in a process have two of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl.attention import AttentionBackend
from minisgl.distributed import Communicator
from minisgl.kvcache.pool import KVPool
from minisgl.moe import MoeBackend


@dataclass
class Context:
    """``pool`` is set by the engine after the weights are loaded and before the first forward."""

    comm: Communicator
    attention: AttentionBackend
    moe: MoeBackend | None  # None: the model has no experts
    device: torch.device
    dtype: torch.dtype
    pool: KVPool | None = None
