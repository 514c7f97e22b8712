"""A student's scheduling policy, asked for one plan: what it asked of the budget, and the form of its plan.

The gates of labs `policy` and `slo` compare the plan with the rules of their lab.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from minisgl.chapters.lab.grader.gate import Broken
from minisgl.scheduler import Plan, Running, Waiting
from minisgl.scheduler.planner import StepBudget

__all__ = ["Recorded", "check_memory", "well_formed_plan"]


class Recorded:
    """The step's budget, which also records the requested and granted tokens: uid → (wanted, granted).

    ``again`` is the first waiting request that was asked for again after the budget had granted tokens to it, or None.
    """

    def __init__(self, budget: StepBudget):
        self._budget = budget
        self.asked: dict[int, tuple[int, int]] = {}
        self.again: int | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens left in the budget."""
        return self._budget.tokens

    @property
    def rows(self) -> int:
        """Number of requests that may still be admitted."""
        return self._budget.rows

    def grant(self, request: Waiting | Running, num_tokens: int) -> int:
        """Ask the budget and record the answer."""
        got = self._budget.grant(request, num_tokens)
        wanted, granted = self.asked.get(request.uid, (0, 0))
        if isinstance(request, Waiting) and granted and self.again is None:
            self.again = request.uid
        self.asked[request.uid] = (wanted + num_tokens, granted + got)
        return got


def well_formed_plan(
    policy: Any, waiting: Sequence[Waiting], running: Sequence[Running], budget: Any, broken: Callable[..., Broken]
) -> Plan:
    """Return the plan of ``policy``: a Plan with at most one row a request, made without changing the requests' lists.

    If it is not, raise the result of ``broken(cause, promise, seen, uid=None)``.
    """
    given = list(waiting), list(running)
    plan = policy.plan(waiting, running, budget)
    if budget.again is not None:
        promise = "`budget.grant` is called once for a waiting request: a second call subtracts its pages again."
        raise broken("ignores-grant", promise, f"It was called again for request {budget.again}.", budget.again)
    if (list(waiting), list(running)) != given:
        seen = "`plan` changed `waiting` or `running`, which the scheduler still uses."
        raise broken("changes", "`plan` changes none of its arguments.", seen)
    if not isinstance(plan, Plan):
        raise broken("returns", "`plan` returns a Plan.", f"It returned {plan!r:.60}.")
    if isinstance(plan.rows, Mapping) or not all(isinstance(row, Sequence) and len(row) == 2 for row in plan.rows):
        seen = f"`rows` is {plan.rows!r:.60}."
        raise broken("returns", "`Plan.rows` has (uid, tokens) pairs, such as [(7, 1), (9, 64)].", seen)
    for uid, count in Counter(uid for uid, _ in plan.rows).items():
        if count > 1:
            promise = "A plan has at most one row for each request."
            raise broken("twice", promise, f"Request {uid} has several rows.", uid)
    return plan


def check_memory(
    plan: Plan,
    policies: tuple[Any, Any],
    waiting: Sequence[Waiting],
    running: Sequence[Running],
    budget: Callable[[], Any],
    broken: Callable[..., Broken],
) -> None:
    """Check that later calls do not change a plan, and that the policy keeps nothing about a request's uid.

    ``policies``: the one that has returned ``plan`` for these requests, and a new one. Both are asked for the plans of
    other requests that have the same uids, and then for a plan without the first request that has a row. ``budget``
    returns a new budget. A result that raises an exception is wrong: `broken` is as in `well_formed_plan`.
    """
    before = [tuple(row) for row in plan.rows], list(plan.retract)
    for other in _others(waiting, running):
        first, new = (policy.plan(*map(list, other), budget()) for policy in policies)
        if dict(first.rows) != dict(new.rows) or list(first.retract) != list(new.retract):
            seen = (
                "After a step in which requests with these uids had other numbers of tokens, it returned another plan "
                "than a new policy object."
            )
            raise broken("impure", "A plan depends only on the arguments of `plan`.", seen)
    uid = before[0][0][0] if before[0] else None
    rest = [w for w in waiting if w.uid != uid], [r for r in running if r.uid != uid]
    if any(rest):
        for policy in policies:
            policy.plan(*rest, budget())
    after = [tuple(row) for row in plan.rows], list(plan.retract)
    if after != before:
        seen = f"A plan had the rows {before[0][:4]}. After later calls of `plan`, the same plan has {after[0][:4]}."
        raise broken("reused", "Each call of `plan` returns new lists, which later calls do not change.", seen)


def _others(waiting: Sequence[Any], running: Sequence[Any]) -> Iterator[tuple[list[Any], list[Any]]]:
    """Yield requests with the same uids as the given ones, of which each has the numbers of another one.

    The uids and the arrivals stay in their order, so a policy that keeps a result about these uids finds it again. At
    last, the uids are in the reverse order.
    """
    if len(waiting) + len(running) <= FEW:
        yield _placed(waiting, reversed(waiting)), _placed(running, reversed(running))
        cached = [w.num_cached_tokens for w in reversed(waiting)]
        pairs = zip(waiting, cached, strict=True)
        yield [w._replace(num_cached_tokens=min(n, w.num_tokens - 1)) for w, n in pairs], list(running)
        same = [w.same_prefix_req for w in reversed(waiting)]
        yield [w._replace(same_prefix_req=uid) for w, uid in zip(waiting, same, strict=True)], list(running)
    yield _turned(waiting), _turned(running)


FEW = 64
"""Steps of more requests than this are changed in one way only, because each plan of a large step takes long."""


def _turned(requests: Sequence[Any]) -> list[Any]:
    """Return the requests with the uids in the reverse order."""
    uids = [request.uid for request in requests]
    return [request._replace(uid=uid) for request, uid in zip(requests, reversed(uids), strict=True)]


def _placed(requests: Sequence[Any], others: Iterable[Any]) -> list[Any]:
    """Return ``others`` with the uids and arrivals of ``requests``."""
    pairs = zip(requests, others, strict=True)
    return [other._replace(uid=request.uid, arrival=request.arrival) for request, other in pairs]
