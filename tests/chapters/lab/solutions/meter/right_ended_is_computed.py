# gate: kept
"""This meter keeps the numbers of ended requests in arrays, drops the oldest itself, and computes `ended` from them."""

from array import array
from collections import deque
from itertools import pairwise
from typing import NamedTuple

from minisgl import hookimpl

KEPT = 10_000


class Timing(NamedTuple):
    uid: int
    ttft: float | None
    gaps: tuple[float, ...]


class Waits:
    def __init__(self):
        self._open = {}  # uid -> the time of the arrival and of each token
        self._done = deque()

    @property
    def ended(self):
        return [self._timing(uid, times) for uid, times in self._done]

    @staticmethod
    def _timing(uid, times):
        waits = [after - before for before, after in pairwise(times)]
        return Timing(uid, waits[0] if waits else None, tuple(waits[1:]))

    def timing(self, uid):
        return self._timing(uid, self._open[uid])

    @hookimpl
    def minisgl_request_added(self, req, now):
        self._open[req.uid] = array("d", [now])

    @hookimpl
    def minisgl_step_finished(self, reqs, now):
        for req in reqs:
            if req is not None:
                self._open[req.uid].append(now)

    @hookimpl
    def minisgl_request_finished(self, req):
        self._done.append((req.uid, self._open.pop(req.uid)))
        if len(self._done) > KEPT:
            self._done.popleft()
