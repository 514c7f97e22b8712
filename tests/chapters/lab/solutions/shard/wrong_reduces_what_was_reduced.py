# causes: reduces, scale
# gate: mlp
"""This MLP calls an all-reduce on the output of a layer that has already summed over the ranks."""

from minisgl.layers import silu_and_mul


class MLP:
    def __init__(self, config, ctx):
        super().__init__()
        self.comm, hidden, inner = ctx.comm, config.hidden_size, config.intermediate_size
        self.gate_up_proj = LinearColParallelMerged(hidden, (inner, inner), ("gate_proj", "up_proj"), ctx)
        self.down_proj = LinearRowParallel(inner, hidden, ctx)

    def forward(self, x):
        return self.comm.all_reduce(self.down_proj(silu_and_mul(self.gate_up_proj(x))))
