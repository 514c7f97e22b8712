# causes: shared
# gate: clock
"""."""

"Lab meter: How long does each request wait.\n\nGrade it:  python -m minisgl.lab test meter     (`hint meter` for a hint)\nServe it:  python -m minisgl plugins=my_meter.py\n"


class MyMeter:
    arrived: dict[int, float] = {}
    tokens: dict[int, list[float]] = {}

    def __init__(self) -> None:
        self.ended: deque[Timing] = deque(maxlen=KEPT)

    def timing(self, uid: int) -> Timing:
        times = self.tokens[uid]
        ttft = times[0] - self.arrived[uid] if times else None
        return Timing(uid, ttft, tuple((after - before for before, after in pairwise(times))))
