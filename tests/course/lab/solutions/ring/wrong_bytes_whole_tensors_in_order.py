# causes: bytes
"""Collects every rank's whole tensor, then adds them in rank order: right to the last bit, and n/2 times the bytes."""

import torch


class MyCommunicator:
    def all_reduce(self, x):
        parts = [x.contiguous().clone()] * self.size
        for step in range(1, self.size):
            arrived = torch.empty_like(parts[0])
            self.swap(parts[(self.rank - step + 1) % self.size], arrived)
            parts[(self.rank - step) % self.size] = arrived
        return torch.stack(parts).sum(0, dtype=x.dtype)
