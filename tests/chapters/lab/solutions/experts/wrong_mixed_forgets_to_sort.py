# causes: mixed
# gate: sort
"""This MoE backend splits the pairs by the counts of the experts without sorting the pairs by expert first."""

import torch


class MyMoe:
    def sort(self, expert, experts):
        order = torch.arange(len(expert))[(expert >= 0) & (expert < experts)]
        pairs, counts, begin = [], [], 0
        for count in torch.bincount(expert[order], minlength=experts).tolist():
            padding = -count % self.block
            pairs += [order[begin : begin + count], order.new_full((padding,), len(expert))]
            counts.append(count + padding)
            begin += count
        return torch.cat(pairs), counts
