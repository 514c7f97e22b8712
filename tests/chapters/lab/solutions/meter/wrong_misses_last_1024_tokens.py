# causes: misses
# gate: clock
"""."""


class MyMeter:
    def __init__(self) -> None:
        self.arrived: dict[int, float] = {}
        self.tokens: dict[int, deque[float]] = {}
        self.ended: deque[Timing] = deque(maxlen=KEPT)

    @hookimpl
    def minisgl_request_added(self, req: Req, now: float) -> None:
        self.arrived[req.uid] = now
        self.tokens[req.uid] = deque(maxlen=1024)

    def timing(self, uid: int) -> Timing:
        times = self.tokens[uid]
        ttft = times[0] - self.arrived[uid] if times else None
        return Timing(uid, ttft, tuple((after - before for before, after in pairwise(times))))
