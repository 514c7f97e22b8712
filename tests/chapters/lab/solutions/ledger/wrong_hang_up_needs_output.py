# causes: hang-up
# gate: requests
"""This auditor reports an error when a request ends without output. A client may disconnect before the first token."""


class MyAuditor:
    @hookimpl
    def minisgl_request_finished(self, req):
        if req.uid not in self.open or not req.output_ids:
            self.find("reply", f"request {req.uid} gets a final reply without output", req.uid)
        self.open.discard(req.uid)
        if req.finish_reason != "error":
            self.leave(req)
