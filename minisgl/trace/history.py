"""A trace as a sequence of turns: each step with its rows, the waiting requests, its events and the state after it.

Drawings, summaries and the viewer are made from turns. This module draws nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from minisgl.trace import events as ev
from minisgl.trace.read import Trace, TraceError
from minisgl.trace.state import State

__all__ = ["Gap", "Row", "Turn", "gaps", "state_at", "turns"]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a step: the positions ``start`` to ``start + count - 1`` of one request."""

    uid: int
    req_pool_idx: int
    start: int
    """First position that the row computes."""
    count: int
    """Number of positions that the row computes, in all rounds."""
    decode: bool
    """Whether this is a decode row or a verification row; otherwise it is a prefill chunk."""
    sample: bool
    """Whether the row samples a token."""
    kept: bool
    """Whether the request gained the sampled token."""
    discarded: bool
    """Whether a token was sampled and then discarded, because the request had ended or had been retracted."""
    num_cached_tokens: int
    """Number of tokens of the prefix that came from the cache; 0 in every row but the first one after an admission."""
    num_drafts: int = 0
    """Number of draft tokens that a verification row computes, in all rounds; 0 in other rows."""
    num_tokens: int = 0
    """Number of tokens that the request gained: 0, 1, or the number of rounds + the number of accepted drafts."""
    rounds: int = 1
    """Number of rounds of a verification row, without those after the end of its request."""

    @property
    def num_accepted(self) -> int | None:
        """Number of accepted drafts. None: not known, because no result was read or its tokens were discarded."""
        return self.num_tokens - self.rounds if self.kept else None


@dataclass
class Turn:
    """One step, and all events from the building of this step to the building of the next step."""

    step: int
    t: float
    """Time of the launch, in seconds on the scheduler's clock."""
    read_at: float | None
    """Time at which the result was read, or None if the result was never read."""
    rows: list[Row]
    waiting: list[int]
    """Uids of the waiting requests, by arrival."""
    events: list[ev.Line] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Number of positions that the step computed."""
        return sum(row.count for row in self.rows)


_BUILDING = (ev.Add, ev.Match, ev.Evict, ev.Allocate, ev.Admit, ev.States, ev.Batch, ev.Plan, ev.Retract)


def turns(trace: Trace) -> Iterator[tuple[Turn, State]]:
    """Yield each step, with the state just before the next step is built.

    All pairs contain the same `State` object, which changes when the iteration continues.
    """
    results = {event.step: event for event in trace if isinstance(event, ev.Done)}
    state, events = State(trace.spec), list[ev.Line]()
    turn: Turn | None = None
    for event in trace:
        if turn is not None and event.step > turn.step and isinstance(event, _BUILDING):
            yield turn, state
            turn, events = None, []
        events.append(event)
        if isinstance(event, ev.Batch):
            turn = _turn(event, results.get(event.step), events, state)
        state.apply(event)
    if turn is not None:
        yield turn, state


def _turn(batch: ev.Batch, done: ev.Done | None, events: list[ev.Line], state: State) -> Turn:
    size = state.spec.page_size
    cached = {event.uid: len(event.pages) * size for event in events if isinstance(event, ev.Match)}
    kept = [0] * len(batch.uids) if done is None else done.gained
    drafts = [0] * batch.num_decode + [len(tokens) for tokens in batch.drafts]
    continuing = len(drafts)
    drafts += [0] * (len(batch.uids) - continuing)
    rounds = [batch.rounds] * len(batch.uids)
    if done is not None and done.rounds is not None:
        rounds = list(map(len, done.rounds))
    rows = [
        Row(
            uid=uid,
            req_pool_idx=batch.req_pool_indices[i],
            start=batch.num_computed_tokens[i],
            count=batch.num_scheduled_tokens[i] * rounds[i],
            decode=i < continuing,
            sample=bool(batch.num_sampled_tokens[i]),
            kept=bool(kept[i] and batch.num_sampled_tokens[i]),
            discarded=done is not None and bool(batch.num_sampled_tokens[i]) and not kept[i],
            num_cached_tokens=cached.get(uid, 0),
            num_drafts=drafts[i] * rounds[i],
            num_tokens=len(done.run(i, bool(batch.num_sampled_tokens[i]))) if done is not None and kept[i] else 0,
            rounds=rounds[i],
        )
        for i, uid in enumerate(batch.uids)
    ]
    waiting = [req.uid for req in state.waiting()]
    return Turn(batch.step, batch.t, None if done is None else done.t, rows, waiting, events)


def state_at(trace: Trace, step: int) -> State:
    """Return the state after ``step``, just before the next step is built. Raises `TraceError` for a missing step."""
    last = -1
    for turn, state in turns(trace):
        if turn.step == step:
            return state
        last = turn.step
    raise TraceError(f"{trace.name} has no step {step}: its last step is {last}.")


class Gap(NamedTuple):
    """The gap between two consecutive tokens of a request.

    ``since`` and ``until`` are the steps that sampled the two tokens. ``num_tokens`` is the number of positions, of all
    requests, that the engine computed after the first and up to the second of these steps.
    """

    uid: int
    since: int
    until: int
    num_tokens: int


def gaps(trace: Trace) -> list[Gap]:
    """Return every gap between two consecutive tokens of one request, in the order in which the gaps ended."""
    found, num_computed = [], 0
    last: dict[int, tuple[int, int]] = {}  # uid -> (step of its last token, positions computed until then)
    for turn, _ in turns(trace):
        num_computed += turn.num_tokens
        for row in turn.rows:
            if row.kept:
                if row.uid in last:
                    since, before = last[row.uid]
                    found.append(Gap(row.uid, since, turn.step, num_computed - before))
                last[row.uid] = (turn.step, num_computed)
    return found
