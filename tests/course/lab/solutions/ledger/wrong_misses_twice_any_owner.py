# causes: misses-twice
"""A page that is given back must be somebody's; whose, it does not ask."""


class MyAuditor:
    def move(self, pages, old, new):
        for page in pages.tolist():
            if page not in self.owner:
                self.find("owner", f"page {page} is nobody's", old, page)
            elif new is not None:
                self.owner[page] = new
            else:
                del self.owner[page]
                if old != CACHE:
                    self.until[page] = self.launched
