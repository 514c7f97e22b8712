# causes: retraction
# gate: requests
"""This auditor closes a retracted request, so the request's real end looks like a second final reply."""


class MyAuditor:
    @hookimpl
    def minisgl_request_retracted(self, req):
        self.leave(req)
        self.open.discard(req.uid)
