"""The causal mask that one writes first: right for a prompt computed whole, wrong for its second chunk."""

from dataclasses import dataclass

import torch

from minisgl import hookimpl
from minisgl.plugins.attention.torch import Torch, TorchAttention


@dataclass
class TopLeft(Torch):
    """Query i sees the keys 0 … i, wherever the query stands."""

    block: int = 8192
    """Queries computed at a time."""


class TopLeftAttention(TorchAttention):
    def _seen(self, first, last, q_len, length, window):
        if q_len == 1:
            return super()._seen(first, last, q_len, length, window)
        key = (first + torch.arange(length)).unsqueeze(1)
        query = torch.arange(q_len).unsqueeze(1)
        return (key <= query).unsqueeze(1)


@hookimpl
def minisgl_configs():
    yield "attention", "topleft", TopLeft


@hookimpl
def minisgl_attention(config, device):
    return TopLeftAttention(config, device) if isinstance(config, TopLeft) else None
