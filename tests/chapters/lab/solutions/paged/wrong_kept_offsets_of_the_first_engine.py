# causes: kept
# gate: gather
"""The offsets inside a page are kept by the class: another engine may have another page size."""

import torch


class MyAttention:
    offsets = None

    def kv_locations(self, pages, length):
        size = self.pool.page_size
        if MyAttention.offsets is None:
            MyAttention.offsets = torch.arange(size)
        starts = pages[: -(-length // size)].long() * size
        return (starts[:, None] + MyAttention.offsets).flatten()[:length]
