"""A meter that keeps the time of a step once, and not again for each request that gained a token in it."""

from array import array
from collections import deque
from itertools import pairwise
from typing import NamedTuple

from minisgl import hookimpl

KEPT = 10_000
BLOCK = 256  # times in a block


class Timing(NamedTuple):
    uid: int
    ttft: float | None
    gaps: tuple[float, ...]


class MyMeter:
    """The times of the steps are in blocks. A request has runs of consecutive steps: (block, first, last + 1).

    Only requests refer to full blocks, so a block is gone with its last request.
    """

    def __init__(self):
        self.block = array("d")
        self.open = {}  # uid -> (arrival, runs); each run is a list
        self.records = deque(maxlen=KEPT)

    @property
    def ended(self):
        return [timing(*record) for record in self.records]

    @hookimpl
    def minisgl_request_added(self, req, now):
        self.open[req.uid] = now, []

    @hookimpl
    def minisgl_step_finished(self, reqs, now):
        if len(self.block) == BLOCK:
            self.block = array("d")
        block, at = self.block, len(self.block)
        block.append(now)
        for req in reqs:
            if req is not None:
                runs = self.open[req.uid][1]
                if runs and runs[-1][0] is block and runs[-1][2] == at:
                    runs[-1][2] += 1
                else:
                    runs.append([block, at, at + 1])

    @hookimpl
    def minisgl_request_finished(self, req):
        arrival, runs = self.open.pop(req.uid)
        self.records.append((req.uid, arrival, tuple(tuple(run) for run in runs)))
        if not self.open:
            self.block = array("d")

    def timing(self, uid):
        return timing(uid, *self.open[uid])

    @hookimpl
    def minisgl_metrics(self):
        done = [each for each in self.ended if each.ttft is not None]
        gaps = sum(len(each.gaps) for each in done)
        return f"minisgl_meter_ttft_seconds_count {len(done)}\nminisgl_meter_inter_token_latency_seconds_count {gaps}\n"


def timing(uid, arrival, runs):
    times = [time for block, first, end in runs for time in block[first:end]]
    gaps = tuple(later - earlier for earlier, later in pairwise(times))
    return Timing(uid, times[0] - arrival if times else None, gaps)
