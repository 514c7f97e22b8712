# causes: evicted
# gate: steps
"""An evicted page keeps the entry of an earlier retirement, so it counts as retired again."""


class MyAuditor:
    def move(self, pages, old, new):
        for page in pages.tolist():
            if self.owner.get(page) != old:
                uid = None if old == CACHE else old
                self.find("owner", f"page {page} is {self.whose(page)}", uid, page)
            elif new is not None:
                self.owner[page] = new
            else:
                del self.owner[page]
                if old != CACHE:
                    self.until[page] = self.launched
