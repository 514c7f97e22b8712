"""This communicator runs two rings at once, one in each direction, each for one half of the tensor.

It holds a `GroupCommunicator` as an attribute instead of inheriting from it.
"""

from dataclasses import dataclass

import torch

from minisgl import hookimpl
from minisgl.plugins.communicator.group import GroupCommunicator
from minisgl.utils.launch import one_launch


@dataclass
class Mine:
    """Two rings: one half of the tensor moves to the right, the other half to the left."""

    timeout: float = 300.0
    """Time limit in seconds of a send or a receive."""

    def build(self, rank, size, address, device):
        return BothWays(self.timeout, rank, size, address, device)


class BothWays:
    def __init__(self, timeout, rank, size, address, device):
        self.rank, self.size = rank, size
        self.link = GroupCommunicator(timeout, rank, size, address, device)
        self.all_gather, self.broadcast = self.link.all_gather, self.link.broadcast
        self.exchange, self.capturing, self.close = self.link.exchange, self.link.capturing, self.link.close

    @one_launch
    def all_reduce(self, x):
        if self.size == 1:
            return x
        flat = x.reshape(-1).clone()
        rings = [(way, half.tensor_split(self.size)) for way, half in zip((1, -1), flat.tensor_split(2))]
        for step in range(1, 2 * self.size - 1):
            # Steps 1 to n - 1 add. Then chunk `rank` is complete on this rank, and the other steps copy the chunks.
            adds, transfers, landed = step < self.size, [], []
            for way, chunks in rings:
                goes, comes = (chunks[(self.rank - way * (step + i)) % self.size] for i in (0, 1))
                received = torch.empty_like(comes)
                landed.append((comes, received))
                transfers.append(self.link.receive(received, (self.rank - way) % self.size))
                transfers.append(self.link.send(goes, (self.rank + way) % self.size))
            for transfer in transfers:
                transfer.wait()
            for comes, received in landed:
                comes.copy_(comes + received if adds else received)
        return flat.view(x.shape)

    def all_reduce_norm(self, x, residual, weight, eps):
        total = self.all_reduce(x) + residual
        return torch.nn.functional.rms_norm(total, weight.shape, weight, eps), total


@hookimpl
def minisgl_configs():
    yield "communicator", "mine", Mine
