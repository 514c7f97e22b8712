"""The `Context`: communicator, attention backend, device, dtype and KV pool of one engine.

The engine builds one context and passes it to every layer's constructor. Two engines in one process have two contexts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from minisgl.attention import AttentionBackend, AttnBatch
from minisgl.config import ConfigError
from minisgl.core import I32
from minisgl.distributed import Communicator
from minisgl.kvcache.pool import KVPool


def no_parts(group: str) -> Any:
    """Refuse to build a part of ``group``."""
    raise ConfigError(f"The model needs a part of the group {group}, and there is none.")


@dataclass
class Context:
    """The objects that all layers of one engine share.

    The engine sets ``pool`` after the weights are loaded and before the first forward pass.
    """

    comm: Communicator
    attention: AttentionBackend
    device: torch.device
    dtype: torch.dtype
    part: Callable[[str], Any] = no_parts
    """Returns the part of a group, which is built for the first layer that needs it: ``ctx.part("moe")``."""
    pool: KVPool | None = None
    states: list[torch.Tensor] = field(default_factory=list)
    """The recurrent states, from `Model.allocate_states`, each [slots, *shape]. The first slots are those of the
    request-pool rows and of the scratch row; further ones hold copies, which only `Step` names."""
    batch: AttnBatch | None = None  # the rows of the step that runs, for layers with a state
    state_saves: tuple[I32, I32, I32] | None = None  # `Step.state_saves` of this step, which the layers carry out
    weights: torch.device | None = None
    """Where `parameter` allocates, if not on ``device``: torch's meta device, which has no memory, if a converter gives
    the layers other weights, or memory, before they are loaded."""

    def parameter(self, *shape: int) -> nn.Parameter:
        """Return an uninitialised weight of ``shape``, which is not trained."""
        weight = torch.empty(shape, dtype=self.dtype, device=self.weights or self.device)
        return nn.Parameter(weight, requires_grad=False)
