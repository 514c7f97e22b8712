# causes: tail
"""Gathers whole pages, and lets decode rows attend to all that came."""


class MyAttention:
    def places(self, pages, length):
        size = self.pool.page_size
        whole = -(-length // size)
        return (pages[:whole].long()[:, None] * size + torch.arange(size)).flatten()
