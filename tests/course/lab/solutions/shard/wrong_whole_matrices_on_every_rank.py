# causes: whole
"""A context of one rank for the feed-forward: right, and every rank loads and computes all of it."""

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
