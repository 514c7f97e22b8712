"""The interface of a scheduling policy: its inputs, its result, and the budget that it asks. Policies are plugins.

A policy decides which requests compute how many tokens in the next step. It allocates nothing: it calls
``budget.grant``, which only subtracts from the step's budget of tokens, rows and pages. The scheduler then checks the
plan, allocates pages, retracts requests and builds the step. A policy is a pure function of about thirty lines; the
shipped policies are in `plugins/scheduler/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from minisgl.core import I32, Req, StepResult

if TYPE_CHECKING:
    from minisgl.scheduler.results import InFlightStep


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
    num_new_pages: int  # new pages that the request's next decode token needs: 0 or 1; 0 during prefill
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
        step do not change the result.
        """


class Plan(NamedTuple):
    """The decision of a policy for one step.

    ``rows``: (uid, tokens) of each request that takes part in the step. ``retract``: uids of running requests to
    return to the waiting queue. If there are any, the scheduler grants ``rows`` again after it has retracted them, and
    drops the rows that do not fit: the pages of a retracted request may become free only with the next result.
    """

    rows: Sequence[tuple[int, int]]
    retract: Sequence[int] = ()


class Room(NamedTuple):
    """What a policy wants to be changed before it plans a step.

    ``retract``: uids of running requests to return to the waiting queue. ``priorities``: (uid, new priority) of waiting
    requests.
    """

    retract: Sequence[int] = ()
    priorities: Sequence[tuple[int, int]] = ()


class SchedulerPolicy(Protocol):
    """Chooses the rows of the next step.

    A policy may have three further members:

    - ``uses_priority = True``: requests may have a ``priority`` other than 0. Otherwise they are rejected.
    - ``victims(running: Sequence[Running]) -> Sequence[int]``: the uids of all requests of ``running``, the one to
      retract first when decode runs out of pages at the front. Without it, that is the least urgent request, by
      priority and then arrival. In either case, the most urgent request is never retracted for pages (promise 5).
    - ``make_room(planner: Planner) -> Room``: called before each call of `plan`, which then sees the requests with the
      changes of the `Room`. It is for a policy that wraps a policy, as `minisgl.scheduler.starvation` does.
    """

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        """Return the plan of the next step, without side effects other than calls of ``budget.grant``.

        ``waiting`` is in order of priority and then arrival, where a retracted request keeps its first arrival.
        Without priorities, that is the order of arrival. Its entries are computed
        when they are read, in some microseconds each, so read no more of a long queue than the step can admit: the
        shipped policies stop at the first request that does not fit, and `minisgl.scheduler.order` bounds how many
        requests they skip. ``running`` is in order of admission. An empty plan means that no request should compute
        now; if no step is in flight either, the scheduler still runs the earliest admitted request that fits, or else
        the oldest waiting one.
        """


class DraftProposer(Protocol):
    """Guesses the next tokens of running requests; a verification row then computes all guesses at once.

    For each request, the scheduler calls `admitted`, then `advanced` and `propose` any number of times, then `removed`;
    at its end, it calls `close`. A subclass need define only `propose`: the other methods do nothing here.
    """

    max_drafts: int
    """The largest number of draft tokens of one request in one step. With 0 the proposer is never called."""

    costly: bool = False
    """Whether drafts take time to compute, as a model's do, and there are always as many as asked for. The scheduler
    then decides how many are worth their time before it asks. Otherwise it decides by the number that it gets."""

    def admitted(self, req: Req) -> None:
        """Note a request that begins to run, or runs again after a retraction: `Req.tokens` are its tokens so far.

        While it runs, no other request has its ``req_pool_idx``.
        """
        return

    def advanced(self, reqs: Sequence[Req], tokens: Sequence[Sequence[int]]) -> None:
        """Note that each request gained tokens, at least one, which are already the last of ``output_ids``."""
        return

    def removed(self, req: Req) -> None:
        """Note that a request does not run any more: it was retracted, or has ended and has a ``finish_reason``."""
        return

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return the draft tokens of each request: guesses for ``positions[i]`` and the positions after it.

        ``limits[i]`` is the largest number of drafts of request i; an empty sequence means no drafts. A request knows
        its tokens up to ``positions[i]``, or all but the last of them: the token before ``positions[i]`` may have been
        sampled by a step whose result is unread.
        """

    def close(self) -> None:
        """Free what the proposer holds. No other method is called any more."""
        return


class Speculation(Protocol):
    """Where the drafts of a scheduler's decode rows come from, and who is told how many were accepted.

    A row with k drafts samples at k + 1 positions, and the result says how many of the tokens count.
    """

    max_drafts: int  # largest number of drafts of a row
    max_draft_tokens: int  # largest number of drafts of a step
    rounds: int  # largest number of rounds of a step: the engine makes the drafts of all but the first one itself

    def admitted(self, reqs: Sequence[Req]) -> None:
        """Note requests that begin to run."""

    def removed(self, reqs: Sequence[Req]) -> None:
        """Note requests that stop to run, before they lose their rows."""

    def propose(self, step_id: int, reqs: Sequence[Req], rows: I32, positions: I32, limits: I32) -> list[Sequence[int]]:
        """Return the drafts of each request in a step: those for ``positions[i]`` and after it, at most ``limits[i]``.

        ``rows`` are the request-pool rows.
        """

    def read(self, launched: InFlightStep, result: StepResult, gained: Sequence[int]) -> None:
        """Note the result of a step: the requests in the rows ``gained`` got ``result.accepted[row]`` tokens each."""

    def close(self) -> None:
        """Free what is held for drafts. No other method is called any more."""


class Constraint(Protocol):
    """The grammar of one request: which tokens the request may sample next."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Add sampled tokens to the request's output, in order."""

    def masks(self, drafts: Sequence[int]) -> I32:
        """Return the masks for the next token and for the token after each draft, as if the drafts were sampled.

        The result is int32 ``[1 + len(drafts), ceil(vocab_size / 32)]`` with the bits of `TokenMasks`. A mask after a
        draft that the grammar does not allow has no effect, since the draft is then rejected.
        """
