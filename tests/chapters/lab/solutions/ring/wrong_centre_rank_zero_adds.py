# causes: centre
# gate: bytes
"""In this communicator, rank 0 receives and adds all tensors and sends the sum back. All bytes pass through rank 0."""

import torch

from minisgl.utils.launch import one_launch


class MyCommunicator:
    @one_launch
    def all_reduce(self, x):
        whole = x.contiguous()
        if self.rank:
            self.send(whole, 0).wait()
            self.receive(whole, 0).wait()
            return whole
        for other in range(1, self.size):
            arrived = torch.empty_like(whole)
            self.receive(arrived, other).wait()
            whole += arrived
        for other in range(1, self.size):
            self.send(whole, other).wait()
        return whole
