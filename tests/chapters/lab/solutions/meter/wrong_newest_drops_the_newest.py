# causes: newest
# gate: kept
"""."""


class MyMeter:
    def __init__(self) -> None:
        self.arrived: dict[int, float] = {}
        self.tokens: dict[int, list[float]] = {}
        self.ended: deque[Timing] = deque()

    @hookimpl
    def minisgl_request_finished(self, req: Req) -> None:
        self.ended.append(self.timing(req.uid))
        if len(self.ended) > KEPT:
            self.ended.pop()
        del self.arrived[req.uid], self.tokens[req.uid]

    def timing(self, uid: int) -> Timing:
        times = self.tokens[uid]
        ttft = times[0] - self.arrived[uid] if times else None
        return Timing(uid, ttft, tuple((after - before for before, after in pairwise(times))))
