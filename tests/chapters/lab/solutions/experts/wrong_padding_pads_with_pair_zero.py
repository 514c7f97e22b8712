# causes: padding
# gate: sort
"""This MoE backend pads with zeros, but 0 is the number of a pair. The padding number is the number of pairs."""

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
