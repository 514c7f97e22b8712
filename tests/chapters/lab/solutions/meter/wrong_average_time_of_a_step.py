# causes: average
# gate: clock
"""This meter measures a gap from the last step that gave a token to any request.

A gap is the time between two tokens of the same request. This meter reports the step time of the batch instead.
"""


class MyMeter:
    def __init__(self) -> None:
        self.arrived = {}
        self.tokens = {}
        self.steps = {}
        self.last = 0.0
        self.ended = deque(maxlen=KEPT)

    @hookimpl
    def minisgl_step_finished(self, reqs, now):
        gained = [req.uid for req in reqs if req is not None]
        for uid in gained:
            if self.tokens[uid]:
                self.steps.setdefault(uid, []).append(now - self.last)
            self.tokens[uid].append(now)
        if gained:
            self.last = now

    def timing(self, uid):
        times = self.tokens[uid]
        gaps = tuple(self.steps.get(uid, []))
        return Timing(uid, times[0] - self.arrived[uid] if times else None, gaps)
