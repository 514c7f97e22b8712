# causes: place
# gate: pages
"""A finding about an eviction names the number of the cache as its request."""


class MyAuditor:
    def move(self, pages, old, new):
        for page in pages.tolist():
            if self.owner.get(page) != old:
                self.find("owner", f"page {page} is {self.whose(page)}", old, page)
            elif new is not None:
                self.owner[page] = new
            else:
                del self.owner[page]
                self.until[page] = -1 if old == CACHE else self.launched
