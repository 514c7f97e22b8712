# causes: average
"""The mean over the answer in place of each gap: the pause that a reader notices disappears in it."""


class MyMeter:
    def timing(self, uid):
        times = self.tokens[uid]
        count = max(len(times) - 1, 0)
        mean = (times[-1] - times[0]) / count if count else 0.0
        return Timing(uid, times[0] - self.arrived[uid] if times else None, (mean,) * count)
