# causes: top-left
# gate: mask
"""This attention backend uses the lower triangular mask of training, which begins at the top left corner."""


class MyAttention:
    def attention_mask(self, queries, length, window, device):
        mask = torch.ones(queries, length, dtype=torch.bool, device=device).tril()
        return mask & mask.triu(length - queries - window + 1) if window >= 0 else mask
