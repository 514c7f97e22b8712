# causes: asking
"""`timing` pops what was kept: right for a request that ends, and an open one that is asked about is lost."""

from itertools import pairwise


class MyMeter:
    @hookimpl
    def minisgl_request_finished(self, req):
        self.ended.append(self.timing(req.uid))

    def timing(self, uid):
        arrived, times = self.arrived.pop(uid), self.tokens.pop(uid)
        return Timing(uid, times[0] - arrived if times else None, tuple(b - a for a, b in pairwise(times)))
