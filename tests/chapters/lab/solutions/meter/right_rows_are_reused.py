"""This meter keeps times in rows that later requests use again. Its timings are plain objects with numpy arrays."""

import numpy as np

from minisgl import hookimpl

KEPT = 10_000


class Waits:
    def __init__(self, uid, waits):
        self.uid = uid
        self.ttft = float(waits[0]) if len(waits) else None
        self.gaps = waits[1:]


class RowMeter:
    def __init__(self):
        self.ended = []
        self.row = {}  # uid -> its row
        self.times, self.free = [], []

    @hookimpl
    def minisgl_request_added(self, req, now):
        if not self.free:
            self.free.append(len(self.times))
            self.times.append([])
        self.row[req.uid] = self.free.pop()
        self.times[self.row[req.uid]] = [now]

    @hookimpl
    def minisgl_step_finished(self, reqs, now):
        for req in reqs:
            if req:
                self.times[self.row[req.uid]].append(now)

    @hookimpl
    def minisgl_request_finished(self, req):
        self.ended.append(self.timing(req.uid))
        del self.ended[:-KEPT]
        self.free.append(self.row.pop(req.uid))
        self.times[self.free[-1]] = []

    def timing(self, uid):
        return Waits(uid, np.diff(np.array(self.times[self.row[uid]])))

    @hookimpl
    def minisgl_metrics(self):
        gaps = sum(len(timing.gaps) for timing in self.ended)
        first = sum(timing.ttft is not None for timing in self.ended)
        return f"minisgl_meter_ttft_seconds_count {first}\nminisgl_meter_inter_token_latency_seconds_count {gaps}\n"
