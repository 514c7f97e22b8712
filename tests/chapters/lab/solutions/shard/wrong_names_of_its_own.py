# causes: names
# gate: mlp
"""This MLP has one matrix for gate and up under the name `gate_up_proj`, which is in no checkpoint."""

from minisgl.layers import LinearColParallelMerged, LinearRowParallel


class MLP:
    def __init__(self, config, ctx):
        super().__init__()
        inner = config.intermediate_size
        self.gate_up_proj = LinearColParallelMerged(config.hidden_size, (2 * inner,), ("gate_up_proj",), ctx)
        self.down_proj = LinearRowParallel(inner, config.hidden_size, ctx)
