# causes: keeps
"""Forgets to forget."""


class MyMeter:
    @hookimpl
    def minisgl_request_finished(self, req):
        self.ended.append(self.timing(req.uid))
