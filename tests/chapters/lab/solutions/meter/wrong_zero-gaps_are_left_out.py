# causes: zero-gaps
# gate: clock
"""This meter leaves out gaps of 0, which two results read at one time of the clock have."""


class MyMeter:
    def timing(self, uid: int) -> Timing:
        times = self.tokens[uid]
        gaps = tuple(after - before for before, after in pairwise(times) if after > before)
        return Timing(uid, times[0] - self.arrived[uid] if times else None, gaps)
