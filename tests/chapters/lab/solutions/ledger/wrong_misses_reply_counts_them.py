# causes: misses-reply
# gate: requests
"""This auditor only removes ended requests from the set of open requests, so it misses a second final reply."""


class MyAuditor:
    @hookimpl
    def minisgl_request_finished(self, req):
        self.open.discard(req.uid)
        if req.finish_reason != "error":
            self.leave(req)
