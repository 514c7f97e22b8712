# causes: average
# gate: clock
"""This meter replaces every gap between tokens by the mean gap of the answer, which hides a long pause."""


class MyMeter:
    def timing(self, uid):
        times = self.tokens[uid]
        count = max(len(times) - 1, 0)
        mean = (times[-1] - times[0]) / count if count else 0.0
        return Timing(uid, times[0] - self.arrived[uid] if times else None, (mean,) * count)
