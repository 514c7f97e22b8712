# causes: bits
# gate: bits
"""In this communicator, every rank's tensor travels around the ring, and each rank adds the tensors as they arrive.

The ranks add in different orders, so their sums differ in rounding.
"""

import torch

from minisgl.utils.launch import one_launch


class MyCommunicator:
    @one_launch
    def all_reduce(self, x):
        passing, total = x.contiguous().clone(), x.contiguous().clone()
        for _ in range(self.size - 1):
            arrived = torch.empty_like(passing)
            self.swap(passing, arrived)
            total += arrived
            passing = arrived
        return total
