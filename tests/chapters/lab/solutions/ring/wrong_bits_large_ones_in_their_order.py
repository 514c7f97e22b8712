# causes: bits
# gate: bits
"""Large tensors are passed around whole, and each rank adds them in the order in which they come."""

import torch

from minisgl.utils.launch import one_launch


class MyCommunicator:
    @one_launch
    def all_reduce(self, x):
        if self.size == 1:
            return x
        whole = x.contiguous()
        if whole.numel() < 8192:
            chunks = whole.view(-1).tensor_split(self.size)
            self.reduce_scatter(chunks)
            self.circulate(chunks)
            return whole
        total, passing = whole.clone(), whole
        for _ in range(self.size - 1):
            arrived = torch.empty_like(passing)
            self.swap(passing, arrived)
            total += arrived
            passing = arrived
        return total
