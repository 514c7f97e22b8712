# causes: long
# gate: gather
"""The numbers of the positions are made for the first 8192 positions of a row."""

import torch

POSITIONS = torch.arange(8192)


class MyAttention:
    def kv_locations(self, pages, length):
        position, size = POSITIONS[:length], self.pool.page_size
        return pages[position // size].long() * size + position % size
