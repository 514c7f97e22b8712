"""An all-reduce in two exchanges: each rank sends every other rank its chunk at once, and sums one chunk itself."""

from dataclasses import dataclass

import torch

from minisgl.hooks import hookimpl
from minisgl.plugins.communicator.group import GroupCommunicator
from minisgl.utils.launch import one_launch


@dataclass
class Mine:
    """A direct all-reduce built from send and receive."""

    timeout: float = 300.0
    """Time limit in seconds of a send or a receive."""

    def build(self, rank, size, address, device):
        return MyCommunicator(self.timeout, rank, size, address, device)


class MyCommunicator(GroupCommunicator):
    def exchange_all(self, outgoing, incoming):
        """Send ``outgoing[r]`` to each other rank r, and receive ``incoming[r]`` from it, all at the same time."""
        others = [(self.rank + i) % self.size for i in range(1, self.size)]  # each rank begins with another one
        messages = [self.send(outgoing[rank], rank) for rank in others]
        messages += [self.receive(incoming[rank], rank) for rank in others]
        for message in messages:
            message.wait()

    @one_launch
    def all_reduce(self, x):
        if self.size == 1:
            return x
        whole = x.contiguous()
        chunks = whole.view(-1).tensor_split(self.size)
        mine = chunks[self.rank]
        parts = [torch.empty_like(mine) for _ in chunks]
        self.exchange_all(chunks, parts)
        for rank, part in enumerate(parts):
            if rank != self.rank:
                mine += part
        self.exchange_all([mine] * self.size, chunks)
        return whole


@hookimpl
def minisgl_configs():
    yield "communicator", "mine", Mine
