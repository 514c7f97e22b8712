# causes: average, gaps
# gate: clock
"""This meter measures each token from the arrival of the request, instead of from the token before."""


class MyMeter:
    def timing(self, uid):
        arrived, times = self.arrived[uid], self.tokens[uid]
        return Timing(uid, times[0] - arrived if times else None, tuple(t - arrived for t in times[1:]))
