# causes: empty
"""Walks over the groups that are there, and gives the second of them expert 1."""

import torch


class MyMoe:
    def multiply(self, weights, rows, counts):
        linear = torch.nn.functional.linear
        groups = [group for group in rows.split(list(counts)) if len(group)]
        done = [
            linear(weights.act(linear(group, weights.gate_up[i])), weights.down[i]) for i, group in enumerate(groups)
        ]
        return torch.cat(done) if done else rows
