# causes: window
# gate: mask
"""This attention backend has a window of one position too many, because it does not count the query's own position."""


class MyAttention:
    def attention_mask(self, queries, length, window, device):
        key = torch.arange(length, device=device)
        query = key[length - queries :, None]
        return (key <= query) & (key >= query - window) if window >= 0 else key <= query
