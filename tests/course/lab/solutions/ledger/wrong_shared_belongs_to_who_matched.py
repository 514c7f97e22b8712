# causes: shared
"""One owner, always: a page of the cache belongs to the last request that matched it."""


class MyAuditor:
    @hookimpl
    def minisgl_prefix_matched(self, req, pages):
        for page in pages.tolist():
            self.owner[page] = req.uid

    @hookimpl
    def minisgl_pages_evicted(self, pages):
        for page in pages.tolist():
            self.owner.pop(page, None)
