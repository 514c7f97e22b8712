"""The interface of a scheduling policy: its inputs, its result, and the budget that it asks. Policies are plugins.

A policy decides which requests compute how many tokens in the next step. It allocates nothing: it calls
``budget.grant``, which only subtracts from the step's budget of tokens, rows and pages. The scheduler then checks the
plan, allocates pages, retracts requests and builds the step. A policy is a pure function of about thirty lines; the
shipped policies are in `plugins/scheduler/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from minisgl.core import Bools, Output, Req, Step, StepResult, TokenMasks

if TYPE_CHECKING:
    from minisgl.scheduler.cache_manager import CacheManager
    from minisgl.scheduler.steps import Ended, InFlightStep, ResultReader


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


class Speculation(Protocol):
    """Gives the draft tokens of a scheduler's decode rows, and is told how many of them were accepted.

    A row with k drafts samples at k + 1 positions, and the result says how many of the tokens count.
    `plugins/speculation/` makes the drafts, decides how many, and allocates the pages of their positions.
    """

    engine_drafts: bool
    """Whether the engine makes drafts too, from the tokens of the requests, which their admissions then carry."""

    def admitted(self, reqs: Sequence[Req]) -> None:
        """Note requests that begin to run."""

    def removed(self, reqs: Sequence[Req]) -> None:
        """Note requests that stop to run, before they lose their rows."""

    def with_drafts(
        self, cache_manager: CacheManager, step: Step, reqs: list[Req], may_repeat: bool
    ) -> tuple[Step, list[Req]]:
        """Return the step in which decode rows verify drafts, and the request of each of its rows.

        Allocate the pages of the drafts. With ``may_repeat``, the step may have several rounds: no request waits.
        """

    def append(
        self, results: ResultReader, launched: InFlightStep, result: StepResult, gained: Bools, out: Output
    ) -> Ended:
        """Append the tokens of a step with verification rows, for the rows ``gained``: see `ResultReader.append`."""

    def read(self, launched: InFlightStep, result: StepResult, gained: Sequence[int]) -> None:
        """Note the result of a step: the requests in the rows ``gained`` got ``result.accepted[row]`` tokens each."""

    def stats(self) -> Mapping[str, int]:
        """Return the counts of verification rows and of drafts since the start, for `Scheduler.stats`."""

    def close(self) -> None:
        """Free what is held for drafts. No other method is called any more."""


class Constraints(Protocol):
    """Keeps the requests of a scheduler that have a constraint (`Req.constraint`), such as a grammar.

    A constraint says which tokens may be sampled next. The classes are in `plugins/constraint/`; the first request with
    a constraint brings this one (``constraint.make_manager(vocab_size)``).
    """

    def add(self, req: Req) -> None:
        """Add a new request. It enters the waiting queue when its constraint is ready."""

    def pop_ready(self, is_idle: bool) -> list[Req]:
        """Return the requests that enter the waiting queue now. If ``is_idle``, wait a moment for the first one."""

    def masks(self, launched: InFlightStep) -> tuple[TokenMasks, Ended]:
        """Return the masks of a step that samples late, and the requests that end because no token is allowed.

        The results of all earlier steps have been read.
        """

    def append(
        self, results: ResultReader, launched: InFlightStep, result: StepResult, out: Output
    ) -> tuple[Bools, Ended]:
        """Do what `ResultReader.append` does, for a step that sampled late, and advance the constraints."""
