# causes: bits
"""Every rank's tensor goes all the way round, and each rank adds them as they come: in its own order."""

import torch


class MyCommunicator:
    def all_reduce(self, x):
        passing, total = x.contiguous().clone(), x.contiguous().clone()
        for _ in range(self.size - 1):
            arrived = torch.empty_like(passing)
            self.swap(passing, arrived)
            total += arrived
            passing = arrived
        return total
