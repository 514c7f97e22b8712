# causes: permutation, overwrites, lost, raises
# gate: scatter
"""This MoE backend computes a pair's token as pair % tokens instead of pair // top_k."""


class MyMoe:
    def scatter(self, rows, pairs, scale, out):
        real = pairs < scale.numel()
        rows, pairs = rows[real], pairs[real]
        rows = rows * scale.flatten()[pairs].unsqueeze(1).to(rows.dtype)
        return out.zero_().index_add_(0, pairs % scale.shape[0], rows)
