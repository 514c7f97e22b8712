# causes: misses-in-flight
# gate: steps
"""This auditor treats a retired page as free at once, although a launched step may still write to the page."""


class MyAuditor:
    @hookimpl
    def minisgl_pages_allocated(self, owners, pages):
        for uid, page in zip(owners.tolist(), pages.tolist(), strict=True):
            if page in self.owner:
                self.find("owner", f"request {uid} gets page {page}, which is {self.whose(page)}", uid, page)
            self.owner[page] = uid
