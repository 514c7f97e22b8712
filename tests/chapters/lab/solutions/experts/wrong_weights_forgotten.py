# causes: weights
# gate: scatter
"""This MoE backend adds up the outputs of the experts without the router's weights."""


class MyMoe:
    def scatter(self, rows, pairs, scale, out):
        real = pairs < scale.numel()
        return out.zero_().index_add_(0, pairs[real] // scale.shape[1], rows[real])
