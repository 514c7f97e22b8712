# causes: rounded
# gate: clock
"""This meter keeps each timing in an array of 32 bits a number."""

from array import array


class MyMeter:
    def timing(self, uid):
        arrived, times = self.arrived[uid], self.tokens[uid]
        gaps = array("f", (after - before for before, after in pairwise(times)))
        return Timing(uid, times[0] - arrived if times else None, tuple(gaps))
