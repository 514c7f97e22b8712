"""This meter keeps one record per request and updates the record at each token; it stores no list of token times."""

from collections import deque
from dataclasses import dataclass, field

from minisgl import hookimpl


@dataclass
class Record:
    uid: int
    since: float  # time of the arrival, then of the newest token
    ttft: float | None = None
    gaps: list = field(default_factory=list)


class Stopwatch:
    def __init__(self):
        self.ended = deque(maxlen=10_000)
        self._open = {}

    @hookimpl
    def minisgl_request_added(self, req, now):
        self._open[req.uid] = Record(req.uid, now)

    @hookimpl
    def minisgl_step_finished(self, result, reqs, now):
        for req in filter(None, reqs):
            record = self._open[req.uid]
            waited, record.since = now - record.since, now
            if record.ttft is None:
                record.ttft = waited
            else:
                record.gaps.append(waited)

    @hookimpl
    def minisgl_request_finished(self, req, now):
        self.ended.append(self._open.pop(req.uid))

    @hookimpl
    def minisgl_metrics(self):
        done = [record for record in self.ended if record.ttft is not None]
        gaps = sum(len(record.gaps) for record in done)
        return f"minisgl_meter_ttft_seconds_count {len(done)}\nminisgl_meter_inter_token_latency_seconds_count {gaps}\n"
