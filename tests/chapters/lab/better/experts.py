"""Experts in batched matrix products: one for all experts that have the same number of blocks of rows.

Each token then gathers its rows, so no row is added to an output in memory.
"""

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
        done, places = [], [[0] * ids.shape[1] for _ in range(ids.shape[0])]
        rows = 0  # of the groups so far
        for group in self.groups(ids, here):
            most = max(map(len, group.values()))
            tokens = [[pair // ids.shape[1] for pair in each] + [0] * (most - len(each)) for each in group.values()]
            for i, each in enumerate(group.values()):
                for j, pair in enumerate(each):
                    places[pair // ids.shape[1]][pair % ids.shape[1]] = rows + i * most + j
            rows += len(group) * most
            chosen = torch.tensor(list(group), device=x.device)
            inner = act(x[torch.tensor(tokens, device=x.device)] @ gate_up[chosen].transpose(1, 2))
            done.append((inner @ down[chosen].transpose(1, 2)).flatten(0, 1))
        if not done:
            return out.zero_()
        found = done[0] if len(done) == 1 else torch.cat(done)
        scale = scale.to(x.dtype)
        if self.is_partial:  # pairs of other ranks have a place, and no weight
            scale = scale * ((ids >= here.start) & (ids < here.stop))
        return torch.sum(found[torch.tensor(places, device=x.device)] * scale.unsqueeze(2), 1, out=out)

    def groups(self, ids, here):
        """Return the local experts and the pairs of each, in groups with the same number of blocks."""
        pairs, experts = defaultdict(list), ids.flatten().tolist()
        self.is_partial = not all(expert in here for expert in experts)
        for pair, expert in enumerate(experts):
            if expert in here:
                pairs[expert - here.start].append(pair)
        groups = defaultdict(dict)
        for expert in sorted(pairs):
            groups[-(-len(pairs[expert]) // self.block)][expert] = pairs[expert]
        return groups.values()


@hookimpl
def minisgl_configs():
    yield "moe", "mine", Mine
