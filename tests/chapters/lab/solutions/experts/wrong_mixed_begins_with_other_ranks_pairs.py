# causes: mixed, other-rank
# gate: sort
"""This MoE backend sorts the pairs of all ranks and takes its own from the front, where pairs of lower ranks are."""

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
