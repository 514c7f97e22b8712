# causes: lost
"""Who left without a token is dropped: the worst waits are missing from the numbers."""


class MyMeter:
    @hookimpl
    def minisgl_request_finished(self, req):
        if self.tokens[req.uid]:
            self.ended.append(self.timing(req.uid))
        del self.arrived[req.uid], self.tokens[req.uid]
