# causes: lost
# gate: clock
"""This meter records no timing for a request that ended without a token, such as one aborted in the waiting queue.

The longest waits are then missing from the statistics.
"""


class MyMeter:
    @hookimpl
    def minisgl_request_finished(self, req):
        if self.tokens[req.uid]:
            self.ended.append(self.timing(req.uid))
        del self.arrived[req.uid], self.tokens[req.uid]
