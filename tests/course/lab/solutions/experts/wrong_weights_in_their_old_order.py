# causes: weights
"""The rows were sorted; their weights were not."""


class MyMoe:
    def scatter(self, rows, pairs, scale, out):
        real = pairs < scale.numel()
        rows, pairs = rows[real], pairs[real]
        rows = rows * scale.flatten()[: len(rows)].unsqueeze(1).to(rows.dtype)
        return out.zero_().index_add_(0, pairs // scale.shape[1], rows)
