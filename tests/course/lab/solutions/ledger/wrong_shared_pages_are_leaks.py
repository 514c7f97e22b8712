# causes: shared
"""What the cache takes over stays the request's own in these books."""


class MyAuditor:
    @hookimpl
    def minisgl_pages_cached(self, req, pages):
        pass

    @hookimpl
    def minisgl_pages_evicted(self, pages):
        for page in pages.tolist():
            self.owner.pop(page, None)
