"""A short tour of a run: the first step of each kind of event that is worth seeing, with a sentence about it.

The viewer opens at the first stop and walks through the others. A stop exists only if the run has such an event.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from minisgl.trace import events as ev
from minisgl.trace.history import Turn, turns
from minisgl.trace.read import Trace

__all__ = ["MAX_STOPS", "Stop", "tour"]

MAX_STOPS = 8
"""Number of stops of the longest tour."""


class Stop(NamedTuple):
    """One stop: a step, the panel to look at, the request to follow (None: none), and what to see there."""

    step: int
    panel: str
    uid: int | None
    text: str


Finder = Callable[[Turn], Stop | None]


def _prompt(turn: Turn) -> Stop | None:
    for row in turn.rows:
        if not row.decode and row.count > 1:
            text = f"Request {row.uid} computes {row.count} tokens of its prompt in one step: a prefill chunk."
            return Stop(turn.step, "timeline", row.uid, text)
    return None


def _mixed(turn: Turn) -> Stop | None:
    prefill = [row for row in turn.rows if not row.decode]
    decode = len(turn.rows) - len(prefill)
    if not prefill or not decode:
        return None
    text = (
        f"One step for both: {decode} answer{'s' if decode > 1 else ''} gain{'' if decode > 1 else 's'} a token while "
        f"request {prefill[0].uid} computes {prefill[0].count} tokens of its prompt."
    )
    return Stop(turn.step, "timeline", prefill[0].uid, text)


def _hit(turn: Turn) -> Stop | None:
    for row in turn.rows:
        if row.num_cached_tokens:
            text = (
                f"Request {row.uid} begins like an earlier request: {row.num_cached_tokens} of its tokens are in the "
                "cache, and only the rest is computed. Its prefix in the tree is outlined."
            )
            return Stop(turn.step, "tree", row.uid, text)
    return None


def _waits(turn: Turn) -> Stop | None:
    if not turn.rows or not turn.waiting:
        return None
    n = len(turn.waiting)
    text = f"{n} request{'s' if n > 1 else ''} wait{'' if n > 1 else 's'} for a place: a dotted line until it begins."
    return Stop(turn.step, "timeline", None, text)


def _evict(turn: Turn) -> Stop | None:
    for event in turn.events:
        if isinstance(event, ev.Evict) and event.pages:
            text = f"The pool is full: the cache evicts {len(event.pages)} pages that no request uses any more."
            return Stop(turn.step, "pages", None, text)
    return None


def _retract(turn: Turn) -> Stop | None:
    for event in turn.events:
        if isinstance(event, ev.Retract):
            text = f"Too few pages for all answers: request {event.uid} gives its pages back, and waits again."
            return Stop(turn.step, "timeline", event.uid, text)
    return None


def _drafts(turn: Turn) -> Stop | None:
    for row in turn.rows:
        if row.num_drafts and row.num_accepted:
            text = (
                f"Request {row.uid} checks {row.num_drafts} guessed tokens in one step; {row.num_accepted} were right, "
                f"so it gains {row.num_tokens} tokens."
            )
            return Stop(turn.step, "timeline", row.uid, text)
    return None


def _ends(turn: Turn) -> Stop | None:
    for event in turn.events:
        if isinstance(event, ev.Finish) and event.finish_reason in ("stop", "length"):
            text = f"Request {event.uid} ends. Its pages stay in the cache as long as no other request needs the room."
            return Stop(turn.step, "pages", event.uid, text)
    return None


FINDERS: tuple[Finder, ...] = (_prompt, _waits, _mixed, _hit, _drafts, _ends, _evict, _retract)


def tour(trace: Trace) -> list[Stop]:
    """Return the stops of a run, by step."""
    found: dict[Finder, Stop] = {}
    for turn, _ in turns(trace):
        for finder in FINDERS:
            if finder not in found and (stop := finder(turn)):
                found[finder] = stop
        if len(found) == len(FINDERS):
            break
    return sorted(found.values(), key=lambda stop: stop.step)[:MAX_STOPS]
