# causes: evicted
"""Every page that becomes free waits for the launched steps, also one that nobody read."""


class MyAuditor:
    def move(self, pages, old, new):
        for page in pages.tolist():
            if self.owner.get(page) != old:
                self.find("owner", f"page {page} is {self.whose(page)}", old, page)
            elif new is None:
                del self.owner[page]
                self.until[page] = self.launched
            else:
                self.owner[page] = new
