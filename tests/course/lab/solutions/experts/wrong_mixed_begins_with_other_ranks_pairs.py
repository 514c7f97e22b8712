# causes: mixed
"""Sorts all pairs, and cuts its own from the front, where those of lower ranks stand."""

import torch


class MyMoe:
    def sort(self, expert, experts):
        order, begin = expert.argsort(stable=True), 0
        ours = expert[(expert >= 0) & (expert < experts)]
        pairs, counts = [], []
        for count in torch.bincount(ours, minlength=experts).tolist():
            padding = -count % self.block
            pairs += [order[begin : begin + count], order.new_full((padding,), len(expert))]
            counts.append(count + padding)
            begin += count
        return torch.cat(pairs), counts
