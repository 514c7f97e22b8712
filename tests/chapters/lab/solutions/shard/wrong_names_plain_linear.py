# causes: names, whole
# gate: mlp
"""This MLP uses `torch.nn.Linear` as its last matrix.

Every rank then holds the whole matrix, and the loader of weights does not fill it.
"""

import torch

from minisgl.layers import silu_and_mul


class MLP:
    def __init__(self, config, ctx):
        super().__init__()
        self.comm, hidden, inner = ctx.comm, config.hidden_size, config.intermediate_size
        self.gate_up_proj = LinearColParallelMerged(hidden, (inner, inner), ("gate_proj", "up_proj"), ctx)
        self.down_proj = torch.nn.Linear(inner, hidden, bias=False)

    def forward(self, x):
        inner = silu_and_mul(self.gate_up_proj(x))
        return self.down_proj(self.comm.all_gather(inner) if self.comm.size > 1 else inner)
