# causes: empty
# gate: multiply
"""This MoE backend numbers only the experts that have rows, so rows behind an expert without rows get wrong weights."""

import torch


class MyMoe:
    def multiply(self, weights, rows, counts):
        linear = torch.nn.functional.linear
        groups = [group for group in rows.split(list(counts)) if len(group)]
        done = [
            linear(weights.act(linear(group, weights.gate_up[i])), weights.down[i]) for i, group in enumerate(groups)
        ]
        return torch.cat(done) if done else rows
