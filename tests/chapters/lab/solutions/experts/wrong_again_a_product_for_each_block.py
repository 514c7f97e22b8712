# causes: again
# gate: counts
"""This MoE backend computes one product per block, so it reads an expert's weights once per block."""

import torch


class MyMoe:
    def multiply(self, weights, rows, counts):
        linear, done, begin = torch.nn.functional.linear, [rows[:0]], 0
        for expert, count in enumerate(counts):
            for at in range(begin, begin + count, self.block):
                inner = weights.act(linear(rows[at : min(at + self.block, begin + count)], weights.gate_up[expert]))
                done.append(linear(inner, weights.down[expert]))
            begin += count
        return torch.cat(done)
