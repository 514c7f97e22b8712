# causes: retraction
"""A request that made way is measured as a new one when it comes back."""


class MyMeter:
    @hookimpl
    def minisgl_request_retracted(self, req):
        self.tokens[req.uid] = []
