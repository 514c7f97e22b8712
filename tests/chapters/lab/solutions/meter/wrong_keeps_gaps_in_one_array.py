# causes: keeps
# gate: kept
"""The gaps of all ended requests are in one array. The gaps of dropped timings stay there."""

from array import array


class MyMeter:
    def __init__(self) -> None:
        self.arrived: dict[int, float] = {}
        self.tokens: dict[int, list[float]] = {}
        self.gaps = array("d")
        self.records: deque[tuple[int, float | None, int, int]] = deque(maxlen=KEPT)

    @property
    def ended(self):
        return [Timing(uid, ttft, tuple(self.gaps[first:end])) for uid, ttft, first, end in self.records]

    @hookimpl
    def minisgl_request_finished(self, req):
        timing, first = self.timing(req.uid), len(self.gaps)
        self.gaps.extend(timing.gaps)
        self.records.append((timing.uid, timing.ttft, first, len(self.gaps)))
        del self.arrived[req.uid], self.tokens[req.uid]
