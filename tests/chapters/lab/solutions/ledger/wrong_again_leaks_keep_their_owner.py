# causes: again
# gate: requests
"""This auditor reports a leaked page at the retraction of its request, and again at the request's end."""


class MyAuditor:
    def leave(self, req):
        for page in [page for page, owner in self.owner.items() if owner == req.uid]:
            self.find("leak", f"request {req.uid} still owns page {page}", req.uid, page)
