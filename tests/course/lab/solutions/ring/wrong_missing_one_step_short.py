# causes: missing, order
"""n ranks, n - 1 steps: one of them was counted away."""


class MyCommunicator:
    def reduce_scatter(self, chunks):
        import torch

        for step in range(1, self.size - 1):
            incoming = chunks[(self.rank - step - 1) % self.size]
            arrived = torch.empty_like(incoming)
            self.swap(chunks[(self.rank - step) % self.size], arrived)
            incoming += arrived
