# causes: hang-up
"""A request that ends without ever having had a page is called a fault; its client had left."""


class MyAuditor:
    @hookimpl
    def minisgl_request_finished(self, req):
        if req.uid not in self.open or not req.output_ids:
            self.find("reply", f"request {req.uid} gets a reply without an answer", req.uid)
        self.open.discard(req.uid)
        if req.finish_reason != "error":
            self.leave(req)
