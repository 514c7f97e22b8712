# causes: permutation, raises
"""Takes the rows as if they still stood token after token."""


class MyMoe:
    def scatter(self, rows, pairs, scale, out):
        tokens, top_k = scale.shape
        rows = rows[pairs < scale.numel()].view(tokens, top_k, -1)
        return out.copy_((rows * scale.unsqueeze(2).to(rows.dtype)).sum(1))
