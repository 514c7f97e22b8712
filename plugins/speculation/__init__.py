"""Speculative decoding: the interface of proposers of draft tokens, and the built-in proposers, one file each.

A proposer guesses tokens. `minisgl.plugins.speculation.adaptive` decides how many of them a step verifies, and gives
them to the scheduler. `minisgl.plugins.speculation.rounds` lets a step verify several times. Without this folder, a
server has no drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from minisgl.core import Bools, EngineSpec, Output, Req, Step, StepResult

if TYPE_CHECKING:
    from minisgl.scheduler.cache_manager import CacheManager
    from minisgl.scheduler.steps import Ended, InFlightStep, ResultReader

__all__ = ["DraftProposer", "Speculation", "accepted_by_round"]


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

    def speculate(
        self,
        spec: EngineSpec,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_draft_tokens: int = 512,
        adapt: bool = True,
        rounds: int = 1,
    ) -> Speculation | None:
        """Return what gives a new scheduler the drafts of this proposer; None if it makes none.

        ``clock`` returns seconds. A step has at most ``max_draft_tokens`` drafts, and at most ``rounds`` rounds. With
        ``adapt``, the number of drafts follows how many were accepted, and how long steps take. A proposer inherits
        this method.
        """
        if not self.max_drafts:
            self.close()
            return None
        from minisgl.plugins.speculation.adaptive import AdaptiveSpeculation

        return AdaptiveSpeculation(self, spec, max_draft_tokens, clock, adapt, rounds)


class Speculation(Protocol):
    """What a scheduler asks: it gives the draft tokens of decode rows, and is told how many of them were accepted.

    A row with k drafts samples at k + 1 positions, and the result says how many of the tokens count.
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


def accepted_by_round(result: StepResult, row: int) -> list[int]:
    """Return how many of ``result.accepted[row]`` tokens are those of each round, up to the round of the last one."""
    left = int(result.accepted[row])
    if result.rounds is None:
        return [left]
    counts = []
    for accepted in result.rounds[:, row].tolist():
        if left > 0:
            counts.append(min(accepted, left))
            left -= accepted
    return counts
