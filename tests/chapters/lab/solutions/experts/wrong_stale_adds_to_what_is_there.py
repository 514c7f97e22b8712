# causes: stale
# gate: scatter
"""This MoE backend adds to `out` without setting it to zero first, although `out` holds old values."""


class MyMoe:
    def scatter(self, rows, pairs, scale, out):
        real = pairs < scale.numel()
        rows, pairs = rows[real], pairs[real]
        rows = rows * scale.flatten()[pairs].unsqueeze(1).to(rows.dtype)
        return out.index_add_(0, pairs // scale.shape[1], rows)
