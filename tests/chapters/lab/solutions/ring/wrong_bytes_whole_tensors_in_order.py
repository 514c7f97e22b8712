# causes: bytes
# gate: bytes
"""In this communicator, each rank collects the whole tensors of all ranks and adds them in rank order.

The sum is bit-identical on all ranks, but each rank sends n/2 times as many bytes as necessary.
"""

import torch

from minisgl.utils.launch import one_launch


class MyCommunicator:
    @one_launch
    def all_reduce(self, x):
        parts = [x.contiguous().clone()] * self.size
        for step in range(1, self.size):
            arrived = torch.empty_like(parts[0])
            self.swap(parts[(self.rank - step + 1) % self.size], arrived)
            parts[(self.rank - step) % self.size] = arrived
        return torch.stack(parts).sum(0, dtype=x.dtype)
