"""Two rings at once, one each way, each with half of the tensor; the group is a part, not a parent."""

from dataclasses import dataclass

import torch

from minisgl import hookimpl
from minisgl.distributed.group import GroupCommunicator
from minisgl.kernel.launch import one_launch


@dataclass
class Mine:
    """Half of the sum goes clockwise, half the other way."""

    patience: float = 300.0
    """Seconds."""


class BothWays:
    def __init__(self, patience, rank, size, address, device):
        self.rank, self.size = rank, size
        self.link = GroupCommunicator(patience, rank, size, address, device)
        self.all_gather, self.broadcast = self.link.all_gather, self.link.broadcast
        self.exchange, self.capturing, self.close = self.link.exchange, self.link.capturing, self.link.close

    @one_launch
    def all_reduce(self, x):
        if self.size == 1:
            return x
        flat = x.reshape(-1).clone()
        rings = [(way, half.tensor_split(self.size)) for way, half in zip((1, -1), flat.tensor_split(2))]
        for step in range(1, 2 * self.size - 1):
            # Steps 1 to n - 1 add; then chunk `rank` is whole, and the same walk goes on from it.
            adds, open_ends, landed = step < self.size, [], []
            for way, chunks in rings:
                goes, comes = (chunks[(self.rank - way * (step + i)) % self.size] for i in (0, 1))
                place = torch.empty_like(comes)
                landed.append((comes, place))
                open_ends.append(self.link.receive(place, (self.rank - way) % self.size))
                open_ends.append(self.link.send(goes, (self.rank + way) % self.size))
            for end in open_ends:
                end.wait()
            for comes, place in landed:
                comes.copy_(comes + place if adds else place)
        return flat.view(x.shape)

    def all_reduce_norm(self, x, residual, weight, eps):
        total = self.all_reduce(x) + residual
        return torch.nn.functional.rms_norm(total, weight.shape, weight, eps), total


@hookimpl
def minisgl_configs():
    yield "communicator", "mine", Mine


@hookimpl
def minisgl_communicator(config, rank, size, address, device):
    if isinstance(config, Mine):
        return BothWays(config.patience, rank, size, address, device)
