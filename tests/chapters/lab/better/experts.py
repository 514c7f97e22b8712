"""Experts in batched matrix products: one for all experts that have the same number of blocks of rows."""

from collections import defaultdict
from dataclasses import dataclass

import torch

from minisgl.hooks import hookimpl
from minisgl.layers.linear import activation as find


@dataclass
class Mine:
    """All chosen experts of a decode step in one batched product."""

    block: int = 16
    """Experts are multiplied together if their rows fill the same number of blocks of this size."""

    def build(self):
        return MyMoe(self.block)


class MyMoe:
    def __init__(self, block):
        self.block = block

    def load(self, gate_up, down, experts, activation):
        return gate_up, down, experts, find(activation)

    def forward(self, weights, x, ids, scale, out):
        gate_up, down, here, act = weights
        tokens, top_k = ids.shape
        padding = tokens * top_k  # no pair's number: a token of zeros, with the weight 0
        x, scale = torch.cat((x, x.new_zeros(1, x.shape[1]))), torch.cat((scale.flatten(), scale.new_zeros(1)))
        total = x.new_zeros(x.shape)
        for group in self.groups(ids, here):
            most = max(map(len, group.values()))
            pairs = torch.tensor([each + [padding] * (most - len(each)) for each in group.values()], device=x.device)
            chosen, token = torch.tensor(list(group), device=x.device), pairs // top_k
            inner = act(x[token] @ gate_up[chosen].transpose(1, 2))
            rows = (inner @ down[chosen].transpose(1, 2)) * scale[pairs].unsqueeze(2).to(x.dtype)
            total.index_add_(0, token.flatten(), rows.flatten(0, 1))
        return out.copy_(total[:tokens])

    def groups(self, ids, here):
        """Return the local experts and the pairs of each, in groups with the same number of blocks."""
        pairs = defaultdict(list)
        for pair, expert in enumerate(ids.flatten().tolist()):
            if expert in here:
                pairs[expert - here.start].append(pair)
        groups = defaultdict(dict)
        for expert in sorted(pairs):
            groups[-(-len(pairs[expert]) // self.block)][expert] = pairs[expert]
        return groups.values()


@hookimpl
def minisgl_configs():
    yield "moe", "mine", Mine
