# causes: lost, overwrites, padding, results, permutation, expert, mixed, other-rank
# gate: scatter
"""Only the first 8 choices of a token are added: a token that chooses nearly all experts lacks some."""


class MyMoe:
    def scatter(self, rows, pairs, scale, out):
        real = (pairs < scale.numel()) & (pairs % scale.shape[1] < 8)
        rows, pairs = rows[real], pairs[real]
        rows = rows * scale.flatten()[pairs].unsqueeze(1).to(rows.dtype)
        return out.zero_().index_add_(0, pairs // scale.shape[1], rows)
