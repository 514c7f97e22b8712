# causes: mixed, lost
"""Pads with zeros, and 0 is a pair."""

import torch


class MyMoe:
    def sort(self, expert, experts):
        order, begin = expert.argsort(stable=True), int((expert < 0).sum())
        ours = expert[(expert >= 0) & (expert < experts)]
        pairs, counts = [], []
        for count in torch.bincount(ours, minlength=experts).tolist():
            padding = -count % self.block
            pairs.append(torch.nn.functional.pad(order[begin : begin + count], (0, padding)))
            counts.append(count + padding)
            begin += count
        return torch.cat(pairs), counts
