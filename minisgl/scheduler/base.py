"""What a scheduling policy sees and answers. Policies are plugins: pure functions of some thirty lines.

A policy decides who computes how many tokens in the next step. It allocates nothing: it asks ``budget.grant``, an
accountant over a copy; the scheduler checks the plan, allocates, retracts and builds the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Waiting(NamedTuple):
    """A request that has no slot."""

    uid: int
    arrival: int  # arrival number, not a clock
    num_tokens: int  # tokens to compute if nothing were cached (prompt and kept output)
    num_cached_tokens: int  # how many of them the cache holds
    same_prefix_req: int | None  # an earlier request that will compute the same next page: waiting is cheaper
    skipped_steps: int  # steps it was left out
    priority: int = 0  # 0 for all today


class Running(NamedTuple):
    """A request that has a slot."""

    uid: int
    num_remaining_tokens: int  # prompt tokens still to compute; 0: it decodes
    num_new_pages: int  # pages that its next token needs
    skipped_steps: int  # steps it was left out
    admission_order: int  # order of admission
    ready: bool = True  # for all today; False: its last token must reach the host first (a grammar)


class Budget(Protocol):
    """What one step can hold. Each grant is taken off."""

    tokens: int  # left of max_prefill_tokens; a decode row takes one too, but is never refused for it
    rows: int  # free slots

    def grant(self, who: Waiting | Running, want: int) -> int:
        """How many of ``want`` tokens fit: 0 where it gets none. A waiting request is granted only if all its
        pages fit; what it shares with the cache is locked before what is evictable is counted."""


class Plan(NamedTuple):
    """``rows``: (uid, tokens) for each request that takes part. ``retract``: uids to put back into the queue."""

    rows: Sequence[tuple[int, int]]
    retract: Sequence[int] = ()


class SchedulerPolicy(Protocol):
    """Chooses the next step's rows."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        """Pure. ``waiting`` is in order of arrival (retracted ones first) and computed as it is iterated;
        ``running`` is in order of admission. An empty plan means: nothing to do now."""
