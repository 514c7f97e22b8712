"""An observer that measures how long each request waits for its first token, and between two tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from minisgl.core import Req
from minisgl.hooks import hookimpl

KEPT = 10_000
"""Ended requests whose timings are kept."""


class Timing(NamedTuple):
    """The timing of one request, in seconds. ``ttft`` is None as long as the request has no token."""

    uid: int
    ttft: float | None
    gaps: tuple[float, ...]


class Waits:
    """Records the timing of every request. ``ended`` has those of ended requests, in the order of their ends.

    ``aborted`` counts the requests whose clients hung up: a dashboard shows them apart from the others.
    """

    def __init__(self) -> None:
        self.arrived: dict[int, float] = {}  # uid of an open request -> its arrival
        self.latest: dict[int, float] = {}  # uid -> the time of its latest token
        self.first: dict[int, float] = {}  # uid -> the time of its first token
        self.gaps: dict[int, list[float]] = {}
        self.ended: deque[Timing] = deque(maxlen=KEPT)
        self.aborted = 0

    @hookimpl
    def minisgl_request_added(self, req: Req, now: float) -> None:
        """Record the arrival of a request."""
        self.arrived[req.uid] = now

    @hookimpl
    def minisgl_step_finished(self, reqs: Sequence[Req | None], now: float) -> None:
        """Record the time of each row that gained a token."""
        for req in reqs:
            if req is not None:
                self._token(req.uid, now)

    def _token(self, uid: int, now: float) -> None:
        """Record a token."""
        if uid in self.latest:
            self.gaps.setdefault(uid, []).append(now - self.latest[uid])
        else:
            self.first[uid] = now
        self.latest[uid] = now

    @hookimpl
    def minisgl_request_finished(self, req: Req) -> None:
        """Record the end of a request."""
        self.ended.append(self.timing(req.uid))
        if req.finish_reason == "abort":
            self._abort(req.uid)
        else:
            self._complete(req.uid)

    def timing(self, uid: int) -> Timing:
        """Return the timing of an open request so far."""
        ttft = self.first[uid] - self.arrived[uid] if uid in self.first else None
        return Timing(uid, ttft, tuple(self.gaps.get(uid, ())))

    def _complete(self, uid: int) -> None:
        """Forget a request whose answer is whole, or failed."""
        del self.arrived[uid]
        self.first.pop(uid, None)
        self.latest.pop(uid, None)
        self.gaps.pop(uid, None)

    def _abort(self, uid: int) -> None:
        """Forget a request whose client hung up."""
        self.aborted += 1
        del self.arrived[uid]
        self.first.pop(uid, None)
        self.latest.pop(uid, None)
        self.gaps.pop(uid, None)
