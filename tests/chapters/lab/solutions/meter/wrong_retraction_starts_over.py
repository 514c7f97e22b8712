# causes: retraction
# gate: clock
"""This meter deletes the tokens of a retracted request, and measures the request as a new one when it runs again."""


class MyMeter:
    @hookimpl
    def minisgl_request_retracted(self, req):
        self.tokens[req.uid] = []
