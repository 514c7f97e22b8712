# causes: padding, mixed, other-rank
# gate: sort
"""This MoE backend pads only the end of the sorted list, so a block may hold rows of two experts."""

import torch


class MyMoe:
    def sort(self, expert, experts):
        ours = (expert >= 0) & (expert < experts)
        order = expert.argsort(stable=True)
        order = order[ours[order]]
        counts = torch.bincount(expert[ours], minlength=experts).tolist()
        padding = -len(order) % self.block
        counts[-1] += padding
        return torch.cat((order, order.new_full((padding,), len(expert)))), counts
