# causes: missing, order
# gate: scatter
"""This reduce-scatter runs n - 2 steps for n ranks instead of n - 1, so one rank's part is missing from each sum."""


class MyCommunicator:
    def reduce_scatter(self, chunks):
        import torch

        for step in range(1, self.size - 1):
            incoming = chunks[(self.rank - step - 1) % self.size]
            arrived = torch.empty_like(incoming)
            self.swap(chunks[(self.rank - step) % self.size], arrived)
            incoming += arrived
