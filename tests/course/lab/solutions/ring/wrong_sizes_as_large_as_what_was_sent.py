# causes: sizes
"""Expects as many elements as it sends: right only where all chunks are equally long."""

import torch


class MyCommunicator:
    def reduce_scatter(self, chunks):
        for step in range(1, self.size):
            outgoing = chunks[(self.rank - step) % self.size]
            arrived = torch.empty_like(outgoing)
            self.swap(outgoing, arrived)
            chunks[(self.rank - step - 1) % self.size] += arrived
