# causes: engine-died
# gate: requests
"""This auditor reports leaked pages at the end of every request, also when the engine has died and retires no pages."""


class MyAuditor:
    @hookimpl
    def minisgl_request_finished(self, req):
        if req.uid not in self.open:
            self.find("reply", f"request {req.uid} gets a second final reply", req.uid)
        self.open.discard(req.uid)
        self.leave(req)
