# causes: asking
# gate: clock
"""In this meter, `timing` removes the data of the request for which it is called.

That is right when a request ends. But `timing` may also be called for an open request, whose data is then lost.
"""

from itertools import pairwise


class MyMeter:
    @hookimpl
    def minisgl_request_finished(self, req):
        self.ended.append(self.timing(req.uid))

    def timing(self, uid):
        arrived, times = self.arrived.pop(uid), self.tokens.pop(uid)
        return Timing(uid, times[0] - arrived if times else None, tuple(b - a for a, b in pairwise(times)))
