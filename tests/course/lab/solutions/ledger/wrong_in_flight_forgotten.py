# causes: misses-in-flight
"""Given back is free."""


class MyAuditor:
    @hookimpl
    def minisgl_pages_allocated(self, owners, pages):
        for uid, page in zip(owners.tolist(), pages.tolist(), strict=True):
            if page in self.owner:
                self.find("owner", f"request {uid} takes page {page}, which is {self.whose(page)}", uid, page)
            self.owner[page] = uid
