# causes: misses-owner
# gate: pages
"""The pages of one allocation are checked before any of them gets its owner."""


class MyAuditor:
    @hookimpl
    def minisgl_pages_allocated(self, owners: I32, pages: I32) -> None:
        before = dict(self.owner)
        for uid, page in zip(owners.tolist(), pages.tolist(), strict=True):
            if page in before:
                self.find("owner", f"request {uid} gets page {page}, which is {self.whose(page)}", uid, page)
            elif self.until.get(page, -1) > self.read:
                self.find("in-flight", f"request {uid} gets page {page} too early", uid, page)
            self.owner[page] = uid
