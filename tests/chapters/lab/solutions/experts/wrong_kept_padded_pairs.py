# causes: kept
# gate: sort
"""The tensor of padded pairs is kept by its length: its padding holds pairs of an earlier call."""

import torch


class MyMoe:
    def sort(self, expert, experts):
        order = expert.argsort(stable=True)
        begin = int((expert < 0).sum())
        real = torch.bincount(expert[(expert >= 0) & (expert < experts)], minlength=experts).tolist()
        counts = [-(-n // self.block) * self.block for n in real]
        kept = self.__dict__.setdefault("kept", {})
        if sum(counts) not in kept:
            kept[sum(counts)] = torch.full((sum(counts),), len(expert))
        pairs, at = kept[sum(counts)], 0
        for n, padded in zip(real, counts, strict=True):
            pairs[at : at + n] = order[begin : begin + n]
            at, begin = at + padded, begin + n
        return pairs, counts
