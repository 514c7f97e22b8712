# causes: overwrites
"""out[tokens] += rows reads once, adds, and writes once: of equal indices one stays."""


class MyMoe:
    def scatter(self, rows, pairs, scale, out):
        real = pairs < scale.numel()
        rows, pairs = rows[real], pairs[real]
        out.zero_()
        out[pairs // scale.shape[1]] += rows * scale.flatten()[pairs].unsqueeze(1).to(rows.dtype)
        return out
