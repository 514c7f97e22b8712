# causes: misses-leak
# gate: requests
"""This auditor takes the uid 0 for no request."""


class MyAuditor:
    def leave(self, req):
        for page in [page for page, owner in self.owner.items() if owner and owner == req.uid]:
            self.find("leak", f"request {req.uid} still owns page {page}", req.uid, page)
            del self.owner[page]
