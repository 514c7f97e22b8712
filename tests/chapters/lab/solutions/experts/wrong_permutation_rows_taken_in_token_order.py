# causes: permutation, raises
# gate: scatter
"""This MoE backend reads the rows as if they were in token order, although they are sorted by expert."""


class MyMoe:
    def scatter(self, rows, pairs, scale, out):
        tokens, top_k = scale.shape
        rows = rows[pairs < scale.numel()].view(tokens, top_k, -1)
        return out.copy_((rows * scale.unsqueeze(2).to(rows.dtype)).sum(1))
