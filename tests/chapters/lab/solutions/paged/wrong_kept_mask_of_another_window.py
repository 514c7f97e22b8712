# causes: kept
# gate: mask
"""Masks are kept by the numbers of queries and positions: layers with another window get the first layer's."""

import torch


class MyAttention:
    def attention_mask(self, queries, length, window, device):
        masks = self.__dict__.setdefault("masks", {})
        if (queries, length) not in masks:
            key = torch.arange(length, device=device)
            query = key[length - queries :, None]
            mask = key <= query
            masks[queries, length] = mask & (key > query - window) if window >= 0 else mask
        return masks[queries, length]
