# causes: misses-table
# gate: requests
"""When a request ends, the row with the number of its uid is cleared, which may be another request's."""


class MyAuditor:
    @hookimpl
    def minisgl_request_finished(self, req: Req) -> None:
        if req.uid not in self.open:
            self.find("reply", f"request {req.uid} gets a second final reply", req.uid)
        self.open.discard(req.uid)
        self.table.pop(req.uid, None)
        if req.finish_reason != "error":
            self.leave(req)
