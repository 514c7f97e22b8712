# causes: rounded
# gate: clock
"""This meter counts times from the arrival, and keeps them in 32 bits."""

from array import array


class MyMeter:
    def timing(self, uid):
        times = array("f", (time - self.arrived[uid] for time in self.tokens[uid]))
        return Timing(uid, times[0] if times else None, tuple(after - before for before, after in pairwise(times)))
