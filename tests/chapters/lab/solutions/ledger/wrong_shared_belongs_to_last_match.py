# causes: shared
# gate: requests
"""This auditor makes the last request that matched a cached page the page's owner, although the cache owns the page."""


class MyAuditor:
    @hookimpl
    def minisgl_prefix_matched(self, req, pages):
        for page in pages.tolist():
            self.owner[page] = req.uid

    @hookimpl
    def minisgl_pages_evicted(self, pages):
        for page in pages.tolist():
            self.owner.pop(page, None)
