# causes: empty, raises
# gate: sort
"""This MoE backend counts pairs with `torch.unique`, which gives no count of 0 for an expert without pairs."""

import torch


class MyMoe:
    def sort(self, expert, experts):
        order = expert.argsort(stable=True)
        ours = (expert[order] >= 0) & (expert[order] < experts)
        order = order[ours]
        pairs, counts, begin = [], [], 0
        for count in torch.unique(expert[order], return_counts=True)[1].tolist():
            padding = -count % self.block
            pairs += [order[begin : begin + count], order.new_full((padding,), len(expert))]
            counts.append(count + padding)
            begin += count
        return torch.cat(pairs), counts
