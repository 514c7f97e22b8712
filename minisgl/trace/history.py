"""A run turn by turn: what each step computed, who waited, what moved, and the state that it left.

What a picture or a summary is made of. Knows events and `State`, and draws nothing.
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
    """One row of a step. ``cached`` tokens before it came from the cache (in the first row of a seat only)."""

    uid: int
    slot: int
    start: int
    count: int
    decode: bool
    sample: bool
    gained: bool  # its request got the token that it sampled
    lost: bool  # nobody did
    cached: int


@dataclass
class Turn:
    """One step, and everything that happened from when it was built until the next one was."""

    step: int
    t: float
    read: float | None  # when its result was read; None: never
    rows: list[Row]
    waiting: list[int]  # uids, by arrival
    events: list[ev.Line] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Positions that the step computed."""
        return sum(row.count for row in self.rows)


_BUILDING = (ev.Add, ev.Match, ev.Evict, ev.Allocate, ev.Admit, ev.Batch, ev.Plan, ev.Retract)


def turns(trace: Trace) -> Iterator[tuple[Turn, State]]:
    """Each step with the state as it is just before the next one is built. The state goes on: copy what you keep."""
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
    gained = [0] * len(batch.uids) if done is None else done.gained or [1] * len(batch.uids)
    rows = [
        Row(
            uid=uid,
            slot=batch.req_pool_indices[i],
            start=batch.num_computed_tokens[i],
            count=batch.num_scheduled_tokens[i],
            decode=i < batch.num_decode,
            sample=bool(batch.sample[i]),
            gained=bool(gained[i] and batch.sample[i]),
            lost=done is not None and bool(batch.sample[i]) and not gained[i],
            cached=cached.get(uid, 0),
        )
        for i, uid in enumerate(batch.uids)
    ]
    waiting = [req.uid for req in state.waiting()]
    return Turn(batch.step, batch.t, None if done is None else done.t, rows, waiting, events)


def state_at(trace: Trace, step: int) -> State:
    """The state in which ``step`` left everything. Raises `TraceError` where the trace has no such step."""
    last = -1
    for turn, state in turns(trace):
        if turn.step == step:
            return state
        last = turn.step
    raise TraceError(f"{trace.name} has no step {step}: its last one is {last}.")


class Gap(NamedTuple):
    """Between two tokens of a request: the steps they came from, and the positions computed from one to the other."""

    uid: int
    since: int
    until: int
    tokens: int


def gaps(trace: Trace) -> list[Gap]:
    """Every gap between two tokens of one request, in the order in which they ended."""
    found, work = [], 0
    last: dict[int, tuple[int, int]] = {}
    for turn, _ in turns(trace):
        work += turn.tokens
        for row in turn.rows:
            if row.gained:
                if row.uid in last:
                    since, before = last[row.uid]
                    found.append(Gap(row.uid, since, turn.step, work - before))
                last[row.uid] = (turn.step, work)
    return found
