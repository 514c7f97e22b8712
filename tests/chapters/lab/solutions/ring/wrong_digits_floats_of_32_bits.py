# causes: digits
# gate: sum
"""Floating-point numbers of 64 bits are added as numbers of 32 bits. Integers are right."""

import torch


class MyCommunicator:
    def reduce_scatter(self, chunks):
        for step in range(1, self.size):
            incoming = chunks[(self.rank - step - 1) % self.size]
            arrived = torch.empty_like(incoming)
            self.swap(chunks[(self.rank - step) % self.size], arrived)
            floating = incoming.dtype.is_floating_point
            incoming.copy_(incoming.float() + arrived.float() if floating else incoming + arrived)
