# gate: multiply
"""The outputs of an expert overwrite its rows, which `forward` made for this call."""

import torch


class MyMoe:
    def multiply(self, weights, rows, counts):
        for expert, mine in enumerate(rows.split(list(counts))):
            if len(mine):
                inner = weights.act(mine @ weights.gate_up[expert].T)
                torch.mm(inner, weights.down[expert].T, out=mine)
        return rows
