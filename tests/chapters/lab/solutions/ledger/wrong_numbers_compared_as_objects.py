# causes: numbers
# gate: requests
"""This auditor compares owners with `is`, which is true for equal integers only up to 256."""


class MyAuditor:
    def leave(self, req):
        for page in [page for page, owner in self.owner.items() if owner is req.uid]:
            self.find("leak", f"request {req.uid} still owns page {page}", req.uid, page)
            del self.owner[page]
