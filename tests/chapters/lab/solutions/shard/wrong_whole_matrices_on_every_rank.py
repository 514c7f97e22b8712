# causes: whole
# gate: mlp
"""This MLP uses a context of one rank: the result is right, but every rank loads and computes the whole MLP."""

from dataclasses import replace

from minisgl.layers import LinearColParallelMerged, LinearRowParallel


class Alone:
    rank, size = 0, 1


class MLP:
    def __init__(self, config, ctx):
        super().__init__()
        alone, hidden, inner = replace(ctx, comm=Alone()), config.hidden_size, config.intermediate_size
        self.gate_up_proj = LinearColParallelMerged(hidden, (inner, inner), ("gate_proj", "up_proj"), alone)
        self.down_proj = LinearRowParallel(inner, hidden, alone)
