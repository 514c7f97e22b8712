# causes: weights
# gate: scatter
"""This MoE backend sorts the rows by expert, but multiplies them with the router's weights in token order."""


class MyMoe:
    def scatter(self, rows, pairs, scale, out):
        real = pairs < scale.numel()
        rows, pairs = rows[real], pairs[real]
        rows = rows * scale.flatten()[: len(rows)].unsqueeze(1).to(rows.dtype)
        return out.zero_().index_add_(0, pairs // scale.shape[1], rows)
