# causes: kept, digits
# gate: sum
"""The sums are computed in memory that is as large as the largest tensor so far, and returned as a part of it."""

import torch

from minisgl.utils.launch import one_launch


class MyCommunicator:
    @one_launch
    def all_reduce(self, x):
        if self.size == 1:
            return x
        memory = self.__dict__.setdefault("memory", {})
        if x.dtype not in memory or len(memory[x.dtype]) < x.numel():
            memory[x.dtype] = torch.empty(x.numel(), dtype=x.dtype)
        flat = memory[x.dtype][: x.numel()].copy_(x.reshape(-1))
        chunks = flat.tensor_split(self.size)
        self.reduce_scatter(chunks)
        self.circulate(chunks)
        return flat.view(x.shape)
