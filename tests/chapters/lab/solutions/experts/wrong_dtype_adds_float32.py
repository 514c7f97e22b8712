# causes: dtype
# gate: scatter
"""This MoE backend multiplies by weights in float32, and adds the products to sums in bfloat16."""


class MyMoe:
    def scatter(self, rows, pairs, scale, out):
        real = pairs < scale.numel()
        rows, pairs = rows[real], pairs[real]
        return out.zero_().index_add_(0, pairs // scale.shape[1], rows * scale.flatten()[pairs].unsqueeze(1))
