# causes: sizes
# gate: scatter
"""This reduce-scatter receives into a tensor of the size that it sends, which fails if chunks differ in length."""

import torch


class MyCommunicator:
    def reduce_scatter(self, chunks):
        for step in range(1, self.size):
            outgoing = chunks[(self.rank - step) % self.size]
            arrived = torch.empty_like(outgoing)
            self.swap(outgoing, arrived)
            chunks[(self.rank - step - 1) % self.size] += arrived
