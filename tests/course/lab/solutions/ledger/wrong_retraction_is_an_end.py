# causes: retraction
"""A request that makes way is closed: its real end is then a second one."""


class MyAuditor:
    @hookimpl
    def minisgl_request_retracted(self, req):
        self.leave(req)
        self.open.discard(req.uid)
