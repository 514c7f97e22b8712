# causes: pages
"""Pages follow each other in the pool: on an empty server they do."""


class MyAttention:
    def places(self, pages, length):
        return pages[0].long() * self.pool.page_size + torch.arange(length, device=pages.device)
