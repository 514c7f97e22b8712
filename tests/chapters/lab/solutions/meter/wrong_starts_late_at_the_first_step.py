# causes: starts-late
# gate: clock
"""This meter starts the clock when a request is first scheduled, and so leaves out the time in the waiting queue."""


class MyMeter:
    @hookimpl
    def minisgl_request_added(self, req):
        self.tokens[req.uid] = []

    @hookimpl
    def minisgl_batch_scheduled(self, reqs, now):
        for req in reqs:
            self.arrived.setdefault(req.uid, now)

    @hookimpl
    def minisgl_request_finished(self, req):
        self.arrived.setdefault(req.uid, 0.0)
        self.ended.append(self.timing(req.uid))
        del self.arrived[req.uid], self.tokens[req.uid]
