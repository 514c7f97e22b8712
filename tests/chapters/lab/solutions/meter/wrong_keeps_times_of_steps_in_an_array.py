# causes: keeps
# gate: kept
"""The time of each step is in an array, and stays there."""

from array import array


class MyMeter:
    def __init__(self) -> None:
        self.times = array("d")
        self.arrived: dict[int, float] = {}
        self.tokens: dict[int, list[int]] = {}
        self.ended: deque[Timing] = deque(maxlen=KEPT)

    @hookimpl
    def minisgl_step_finished(self, reqs, now):
        self.times.append(now)
        for req in reqs:
            if req is not None:
                self.tokens[req.uid].append(len(self.times) - 1)

    def timing(self, uid):
        times = [self.times[i] for i in self.tokens[uid]]
        gaps = tuple(later - earlier for earlier, later in pairwise(times))
        return Timing(uid, times[0] - self.arrived[uid] if times else None, gaps)
