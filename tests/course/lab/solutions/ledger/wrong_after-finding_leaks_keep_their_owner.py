# causes: after-finding
# gate: requests
"""A leaked page keeps its owner, so the leak of a retracted request is reported again when the request ends."""


class MyAuditor:
    def leave(self, req):
        for page, owner in self.owner.items():
            if owner == req.uid:
                self.find("leak", f"request {req.uid} still owns page {page}", req.uid, page)
