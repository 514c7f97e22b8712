"""A causal mask with a bug: right for a prompt computed in one step, wrong from the prompt's second chunk on."""

from dataclasses import dataclass

import torch

from minisgl import hookimpl
from minisgl.plugins.attention.torch import Torch, TorchAttention


@dataclass
class TopLeft(Torch):
    """Query i of a chunk sees the keys 0 … i, whatever its position. Wrong on purpose."""

    block: int = 8192
    """Queries computed at a time."""

    def build(self, device):
        return TopLeftAttention(self, device)


class TopLeftAttention(TorchAttention):
    def _mask(self, first, last, q_len, length, window):
        if q_len == 1:
            return super()._mask(first, last, q_len, length, window)
        key = (first + torch.arange(length)).unsqueeze(1)
        query = torch.arange(q_len).unsqueeze(1)
        return (key <= query).unsqueeze(1)


@hookimpl
def minisgl_configs():
    yield "attention", "topleft", TopLeft
