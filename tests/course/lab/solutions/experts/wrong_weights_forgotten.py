# causes: weights
"""Adds the experts' answers as they are."""


class MyMoe:
    def scatter(self, rows, pairs, scale, out):
        real = pairs < scale.numel()
        return out.zero_().index_add_(0, pairs[real] // scale.shape[1], rows[real])
