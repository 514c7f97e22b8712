# causes: average, gaps
"""Every token's time since the request arrived: latency of the answer so far, not between tokens."""


class MyMeter:
    def timing(self, uid):
        arrived, times = self.arrived[uid], self.tokens[uid]
        return Timing(uid, times[0] - arrived if times else None, tuple(t - arrived for t in times[1:]))
