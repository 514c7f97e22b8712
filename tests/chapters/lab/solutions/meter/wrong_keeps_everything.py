# causes: keeps
# gate: kept
"""This meter does not delete the token times of a request when the request ends."""


class MyMeter:
    @hookimpl
    def minisgl_request_finished(self, req):
        self.ended.append(self.timing(req.uid))
