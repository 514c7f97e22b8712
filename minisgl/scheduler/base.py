"""The interface of a scheduling policy: its inputs, its result, and the budget that it asks. Policies are plugins.

A policy decides which requests compute how many tokens in the next step. It allocates nothing: it calls
``budget.grant``, which only subtracts from the step's budget of tokens, rows and pages. The scheduler then checks the
plan, allocates pages, retracts requests and builds the step. A policy is a pure function of about thirty lines; the
shipped policies are in `plugins/scheduler/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Waiting(NamedTuple):
    """A waiting request, as a policy sees it: the request owns no KV pages."""

    uid: int
    arrival: int  # arrival number, not a time
    num_tokens: int  # prompt tokens, and output tokens kept over a retraction
    num_cached_tokens: int  # tokens of the longest cached prefix, in whole pages; less than num_tokens
    same_prefix_req: int | None  # uid of an earlier request that will compute the same next page, if any
    skipped_steps: int  # steps launched since the request was added or last retracted
    priority: int = 0  # lower is more urgent


class Running(NamedTuple):
    """A running request, as a policy sees it: the request owns KV pages."""

    uid: int
    num_remaining_tokens: int  # prompt tokens still to compute; 0 if the request decodes
    num_new_pages: int  # new pages that the request's next decode token needs; 0 during prefill
    skipped_steps: int  # steps launched since the request last had a row
    admission_order: int  # admission number: lower was admitted earlier
    priority: int = 0  # lower is more urgent
    arrival: int = 0  # arrival number, not a time


class Budget(Protocol):
    """The free capacity of one step. Every grant reduces it."""

    tokens: int  # what is left of max_prefill_tokens; a decode row also uses 1, but leaves a quarter to prompts
    rows: int  # requests that the step can still admit: free rows of the request pool, at most 256

    def grant(self, request: Waiting | Running, num_tokens: int) -> int:
        """Return how many of ``num_tokens`` tokens of ``request`` fit into the step; 0 if none do.

        At most the tokens that the request has to compute are granted, also if ``num_tokens`` is larger.
        A waiting request gets tokens only if the pages of all its tokens (prompt and kept output) fit. The pages of
        its cached prefix count as locked first, so they are no longer evictable for its other pages. Call it once for
        a waiting request: a second call would subtract its pages again.
        """

    def retractions(self, order: Sequence[Waiting | Running]) -> list[int]:
        """Return the uids of the running requests that must be retracted to admit waiting requests of ``order``.

        ``order`` has the most important request first. A waiting request counts if it fits beside the requests before
        it; after the first that does not fit, no further one counts. The victims are the last running requests of
        ``order``, the last of all first, and as few as possible. The budget stays as it is. Earlier grants of this
        step do not change the result. The guard chooses them (`plugins/scheduler/victims.py`); without it, there are
        none.
        """


class Plan(NamedTuple):
    """The decision of a policy for one step.

    ``rows``: (uid, tokens) of each request that takes part in the step. ``retract``: uids of running requests to
    return to the waiting queue. If there are any, the scheduler grants ``rows`` again after it has retracted them, and
    drops the rows that do not fit: the pages of a retracted request may become free only with the next result.
    """

    rows: Sequence[tuple[int, int]]
    retract: Sequence[int] = ()


class SchedulerPolicy(Protocol):
    """Chooses the rows of the next step.

    A policy may have four further members:

    - ``uses_priority = True``: requests may have a ``priority`` other than 0. Otherwise they are rejected.
    - ``victims(running: Sequence[Running]) -> Sequence[int]``: the uids of all requests of ``running``, the one to
      retract first when decode runs out of pages at the front. Without it, that is the least urgent request, by
      priority and then arrival. In either case, the most urgent request is never retracted for pages (promise 5).
    - ``make_queue(running: Callable[[], Sequence[Req]]) -> WaitingQueue``: the waiting queue, if it has another order.
      Called once; ``running()`` returns the running requests.
    - ``make_room(planner: Planner) -> Sequence[Req]``: called before each call of `plan`. Returns running requests that
      are retracted before. It is for a policy that wraps a policy, as `minisgl.plugins.scheduler.guard` does.
    """

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        """Return the plan of the next step, without side effects other than calls of ``budget.grant``.

        ``waiting`` is in order of priority and then arrival, where a retracted request keeps its first arrival; the
        guard lets the requests of groups take turns. Without priorities, that is the order of arrival. Its entries are
        computed when they are read, in some microseconds each, so read no more of a long queue than the step can admit.
        The shipped policies stop at the first request that does not fit, and `minisgl.plugins.scheduler` bounds how
        many requests they skip. ``running`` is in order of admission. A running prompt owns its pages, and never
        waits for room that a waiting request lacks.

        An empty plan means that no request should compute now. If no step is in flight either, the scheduler still runs
        the earliest admitted request that fits, or else the oldest waiting one.
        """
