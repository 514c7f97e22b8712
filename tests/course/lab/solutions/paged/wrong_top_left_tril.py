# causes: top-left
"""The mask of training."""


class MyAttention:
    def seen(self, queries, length, window, device):
        seen = torch.ones(queries, length, dtype=torch.bool, device=device).tril()
        return seen & seen.triu(length - queries - window + 1) if window >= 0 else seen
