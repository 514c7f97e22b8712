# causes: alive
# gate: clock
"""This meter returns the list of gaps that it goes on to fill."""


class MyMeter:
    def __init__(self) -> None:
        self.arrived = {}
        self.tokens = {}
        self.gaps = {}
        self.ended = deque(maxlen=KEPT)

    @hookimpl
    def minisgl_step_finished(self, reqs, now) -> None:
        for req in reqs:
            if req is not None:
                times = self.tokens[req.uid]
                times.append(now)
                if len(times) > 1:
                    self.gaps.setdefault(req.uid, []).append(times[-1] - times[-2])

    @hookimpl
    def minisgl_request_finished(self, req) -> None:
        self.ended.append(self.timing(req.uid))
        del self.arrived[req.uid], self.tokens[req.uid]
        self.gaps.pop(req.uid, None)

    def timing(self, uid: int) -> Timing:
        times = self.tokens[uid]
        return Timing(uid, times[0] - self.arrived[uid] if times else None, self.gaps.setdefault(uid, []))
