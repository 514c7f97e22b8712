# causes: shared
# gate: pages
"""This auditor ignores the transfer of pages to the cache, so it reports cached pages as leaks of their request."""


class MyAuditor:
    @hookimpl
    def minisgl_pages_cached(self, req, pages):
        pass

    @hookimpl
    def minisgl_pages_evicted(self, pages):
        for page in pages.tolist():
            self.owner.pop(page, None)
