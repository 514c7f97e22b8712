# causes: added
# gate: circulate
"""This communicator also adds in the second pass around the ring, which should only copy the finished chunks."""

import torch


class MyCommunicator:
    def circulate(self, chunks):
        for step in range(self.size - 1):
            incoming = chunks[(self.rank - step - 1) % self.size]
            arrived = torch.empty_like(incoming)
            self.swap(chunks[(self.rank - step) % self.size], arrived)
            incoming += arrived
