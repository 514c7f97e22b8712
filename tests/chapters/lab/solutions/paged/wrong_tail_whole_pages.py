# causes: tail
# gate: gather
"""This attention backend gathers whole pages, so a row attends to stale KV behind its length in the last page."""


class MyAttention:
    def kv_locations(self, pages, length):
        size = self.pool.page_size
        whole = -(-length // size)
        return (pages[:whole].long()[:, None] * size + torch.arange(size)).flatten()
