# causes: device
# gate: mask
"""The mask is made on the CPU, whatever the device."""

import torch


class MyAttention:
    def attention_mask(self, queries, length, window, device):
        key = torch.arange(length)
        query = key[length - queries :, None]
        mask = key <= query
        return mask & (key > query - window) if window >= 0 else mask
