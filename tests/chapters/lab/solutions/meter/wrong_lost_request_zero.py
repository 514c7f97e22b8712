# causes: lost, keeps
# gate: clock
"""This meter takes the uid 0 for no request."""


class MyMeter:
    @hookimpl
    def minisgl_request_finished(self, req):
        if req.uid:
            self.ended.append(self.timing(req.uid))
            del self.arrived[req.uid], self.tokens[req.uid]
