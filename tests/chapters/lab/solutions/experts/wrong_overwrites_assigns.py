# causes: overwrites
# gate: scatter
"""This MoE backend writes rows with `out[tokens] = rows`, which keeps only one row of each repeated token index."""


class MyMoe:
    def scatter(self, rows, pairs, scale, out):
        real = pairs < scale.numel()
        rows, pairs = rows[real], pairs[real]
        rows = rows * scale.flatten()[pairs].unsqueeze(1).to(rows.dtype)
        out.zero_()
        out[pairs // scale.shape[1]] = rows
        return out
