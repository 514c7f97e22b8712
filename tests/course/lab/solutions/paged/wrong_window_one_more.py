# causes: window
"""The window does not count the query itself."""


class MyAttention:
    def seen(self, queries, length, window, device):
        key = torch.arange(length, device=device)
        query = key[length - queries :, None]
        return (key <= query) & (key >= query - window) if window >= 0 else key <= query
