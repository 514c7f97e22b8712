# causes: self
# gate: mask
"""A query of this backend does not attend to its own position."""

import torch


class MyAttention:
    def attention_mask(self, queries, length, window, device):
        key = torch.arange(length, device=device)
        query = key[length - queries :, None]
        mask = key < query
        return mask & (key > query - window) if window >= 0 else mask
