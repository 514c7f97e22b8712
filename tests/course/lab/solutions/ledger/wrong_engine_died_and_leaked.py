# causes: engine-died
"""Every end is checked for pages left behind, also where the engine is gone."""


class MyAuditor:
    @hookimpl
    def minisgl_request_finished(self, req):
        if req.uid not in self.open:
            self.find("reply", f"request {req.uid} gets a second final reply", req.uid)
        self.open.discard(req.uid)
        self.leave(req)
