# causes: misses-reply
"""Requests minus replies, and zero at the end is fine."""


class MyAuditor:
    @hookimpl
    def minisgl_request_finished(self, req):
        self.open.discard(req.uid)
        if req.finish_reason != "error":
            self.leave(req)
