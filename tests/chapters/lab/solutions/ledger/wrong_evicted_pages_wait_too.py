# causes: evicted
# gate: steps
"""This auditor expects evicted pages to stay unused until the launched steps are read.

Only pages that a request retired must wait. No launched step reads an evicted page, so it is free at once.
"""


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
