# causes: misses-twice
# gate: pages
"""This auditor checks that a retired page has an owner, but not that the owner is the request that retires it."""


class MyAuditor:
    def move(self, pages, old, new):
        for page in pages.tolist():
            if page not in self.owner:
                self.find("owner", f"page {page} has no owner", old, page)
            elif new is not None:
                self.owner[page] = new
            else:
                del self.owner[page]
                if old != CACHE:
                    self.until[page] = self.launched
