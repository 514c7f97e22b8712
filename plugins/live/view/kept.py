"""What rank 0 keeps and tells for a what-if: token ids, which the events may lack, and times of waiting on purpose."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np

from minisgl.core import I32, Req
from minisgl.trace import events as ev
from minisgl.trace.read import TraceError

MAX_TOKENS = 4 << 20
"""The largest number of token ids of ended requests that are kept."""


class Held(ev.Event):
    """The server waited before a step because of the pace, from one time to the other. A trace has no such event."""

    since: float
    until: float


class Tokens(msgspec.Struct):
    """The token ids of requests by uid, and of the pages that were cached at the start: int32 as bytes.

    ``salts`` has a hash of each ``cache_salt``. ``is_whole``: no request was left out.
    """

    requests: dict[int, bytes]
    pages: dict[int, bytes]
    salts: dict[int, str]
    is_whole: bool


class Kept:
    """Keeps what `Tokens` needs, from `begin` on. ``salt_of`` hashes the ``cache_salt`` of a request."""

    def __init__(self, salt_of: Callable[[Req], str | None]):
        self._salt_of = salt_of
        self.begin({})

    def begin(self, pages: dict[int, I32]) -> None:
        """Forget everything; ``pages`` has the token ids of the pages that are cached now."""
        self._pages, self._ended, self._salts = dict(pages), dict[int, I32](), dict[int, str]()
        self._num_tokens = 0

    def end(self, req: Req) -> None:
        """Keep the token ids of a request that has ended."""
        self._num_tokens += len(req)
        if self._num_tokens <= MAX_TOKENS:
            self._ended[req.uid] = req.tokens()
            salt = self._salt_of(req)
            if salt is not None:
                self._salts[req.uid] = salt

    def encode(self, open_requests: Iterable[Req]) -> bytes:
        """Return `Tokens` as bytes."""
        found, salts = {uid: ids.tobytes() for uid, ids in self._ended.items()}, dict(self._salts)
        for req in open_requests:
            found[req.uid], salt = req.tokens().tobytes(), self._salt_of(req)
            if salt is not None:
                salts[req.uid] = salt
        pages = {page: ids.tobytes() for page, ids in self._pages.items()}
        return msgspec.msgpack.encode(Tokens(found, pages, salts, self._num_tokens <= MAX_TOKENS))


def fill_in(events: Iterable[Any], tokens: Tokens) -> None:
    """Put the token ids into the events of a recording. Raise `TraceError` if some are missing."""
    if not tokens.is_whole:
        raise TraceError(
            f"The recording has more than {MAX_TOKENS:,} tokens. Close the page for 10 s to begin a new one."
        )
    events = list(events)
    missing = [event.uid for event in events if isinstance(event, ev.Add) and event.uid not in tokens.requests]
    if missing:
        raise TraceError(f"The recording lacks the token ids of request {missing[0]}: its run can't be repeated.")
    ids = {uid: np.frombuffer(each, np.int32).tolist() for uid, each in tokens.requests.items()}
    at: dict[int, int] = {}
    rows: dict[int, list[int]] = {}
    for event in events:
        match event:
            case ev.Now():
                event.tokens = [(page, np.frombuffer(each, np.int32).tolist()) for page, each in tokens.pages.items()]
                rows |= {batch.step: batch.uids for batch in event.in_flight}
                at |= {req.uid: req.prompt + req.output for req in event.requests}
            case ev.Add():
                at[event.uid] = len(event.prompt_ids)
                event.prompt_ids, event.cache_salt = ids[event.uid][: at[event.uid]], tokens.salts.get(event.uid)
            case ev.Batch():
                rows[event.step] = event.uids
            case ev.Done():
                for i, (uid, gained) in enumerate(zip(rows.pop(event.step), event.gained, strict=True)):
                    if gained:
                        length = 1 if event.runs is None else len(event.runs[i])
                        run = ids[uid][at[uid] : at[uid] + length]
                        event.tokens[i], at[uid] = run[0], at[uid] + length
                        if event.runs is not None:
                            event.runs[i] = run


def without_waits(events: Iterable[Any], waits: Iterable[Held]) -> None:
    """Shift the times of events to a clock that did not run while the server waited because of the pace."""
    waits = sorted(waits, key=lambda each: each.since)
    ends = [each.until for each in waits]
    before = [0.0, *accumulate(each.until - each.since for each in waits)]
    for event in events:
        t = getattr(event, "t", None)
        if t is not None:
            i = bisect_right(ends, t)  # the waits that had ended
            event.t = min(t, waits[i].since if i < len(waits) else t) - before[i]
