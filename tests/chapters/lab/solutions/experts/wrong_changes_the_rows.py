# causes: changes
# gate: scatter
"""Without padding, the rows are multiplied with their weights in place."""


class MyMoe:
    def scatter(self, rows, pairs, scale, out):
        real = pairs < scale.numel()
        if not bool(real.all()):
            rows, pairs = rows[real], pairs[real]
        rows *= scale.flatten()[pairs].unsqueeze(1).to(rows.dtype)
        return out.zero_().index_add_(0, pairs // scale.shape[1], rows)
