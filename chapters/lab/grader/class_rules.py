"""The rules of lab `slo`: every plan of a policy is compared with them, step by step.

The text leaves a choice in these cases, which are not compared: whether requests are retracted for all interactive
requests without room or only for those that the step has tokens for; whether the tokens of retracted decode rows, and
the tokens kept for batch prompts in such a step, go to other prompts; and how the tokens of batch prompts that find no
room are used.

Knows no option's default and no reference: the rules are those that the lab's page states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from minisgl.chapters.lab.grader.asked_policy import Recorded, check_memory, well_formed_plan
from minisgl.chapters.lab.grader.gate import Broken
from minisgl.scheduler import Plan, Running, Waiting
from minisgl.scheduler.planner import StepBudget

__all__ = ["UNLIMITED", "Judge", "Request", "urgency", "wanted"]

Request = Running | Waiting
UNLIMITED = 10**9


def wanted(request: Request) -> int:
    """Return how many prompt tokens a request has to compute."""
    if isinstance(request, Waiting):
        return request.num_tokens - request.num_cached_tokens
    return request.num_remaining_tokens


def urgency(request: Request) -> tuple[int, int]:
    """Order by priority and then by arrival."""
    return request.priority, request.arrival


class RecordedWithRetractions(Recorded):
    """The recorded budget, which a policy may also ask whom to retract."""

    def retractions(self, order: Sequence[Request]) -> list[int]:
        """Ask the budget."""
        return self._budget.retractions(order)


class Judge:
    """A policy that asks the student's policy twice for each step, and a new one once, and checks the plan.

    ``make`` builds the student's policy with the options of ``workload``, and ``decoy`` another one with other options:
    a process may have both.
    """

    uses_priority = True

    def __init__(self, make: Callable[[], Any], workload: dict[str, Any], decoy: Callable[[], Any] = lambda: None):
        self.decoy = decoy
        self.make, self.policy, self.workload, self.steps = make, make(), workload, 0

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: StepBudget) -> Plan:
        """Return the student's plan. Raise `Broken` if it breaks a rule."""
        fresh, recorded = budget.copy(), RecordedWithRetractions(budget)
        given = list(waiting), list(running)
        plan = well_formed_plan(self.policy, waiting, running, recorded, self.broken)
        rows = dict(plan.rows)
        others = [(self.policy, "A second call of `plan`")]
        if self.steps % 4 == 0:
            others[0] = self.policy, "A second call of `plan`, after a policy with other options was made,"
            others.append((self.make(), "A new policy object"))
            unasked = self.make()
            self.decoy()
        for policy, what in others:
            again = policy.plan(waiting, running, RecordedWithRetractions(fresh.copy()))
            if dict(again.rows) != rows or list(again.retract) != list(plan.retract):
                seen = f"{what} returned another plan for the same arguments."
                raise self.broken("impure", "A plan depends only on the arguments of `plan`.", seen)
        if self.steps % 4 == 0:
            check_memory(
                plan, (self.policy, unasked), *given, lambda: RecordedWithRetractions(fresh.copy()), self.broken
            )
        step = _Step(self, rows, list(plan.retract), recorded.asked, *given, fresh)
        step.check_rows()
        step.check_room()
        step.check_tokens()
        step.check_order()
        self.steps += 1
        return plan

    def broken(self, cause: str, promise: str, seen: str, request: int | None = None) -> Broken:
        """Return a finding at the current step."""
        return Broken(cause, promise, seen, step=self.steps, request=request)


class _Step:
    """One plan, with the requests and the budget that it was made from. ``fresh`` is the budget before the plan."""

    def __init__(
        self,
        judge: Judge,
        rows: dict[int, int],
        retract: list[int],
        asked: dict[int, tuple[int, int]],
        waiting: list[Waiting],
        running: list[Running],
        fresh: StepBudget,
    ):
        self.broken, self.rows, self.retract, self.asked, self.fresh = judge.broken, rows, retract, asked, fresh
        options = judge.workload
        self.interactive: int = options["interactive"]
        self.step: int = options["step"]
        self.share: float = options["share"]  # in percent
        self.running, self.all_waiting = running, waiting
        self.waiting = [w for w in waiting if w.same_prefix_req is None]
        requests: list[Request] = [*running, *waiting]
        self.views = {r.uid: r for r in requests}
        self.decoding = sorted((r for r in running if not r.num_remaining_tokens), key=urgency)
        self.begun = sorted((r for r in running if r.num_remaining_tokens), key=urgency)
        left = fresh.copy()
        decoded = sum(bool(left.grant(r, 1)) for r in self.decoding if r.uid in rows)
        self.is_open = any(map(self.is_interactive, requests))  # also those that are left out for their prefix
        full = max(self.step - decoded, -(-self.step // 4)) if self.is_open else left.tokens
        self.limit = min(full, left.tokens)
        before = fresh.copy()
        decoding = sum(bool(before.grant(r, 1)) for r in self.decoding)  # decode rows, if nothing is retracted
        least = max(self.step - decoding, -(-self.step // 4)) if self.is_open else before.tokens
        self.least = min(least, before.tokens, self.limit)  # prompt tokens, if nothing is retracted
        self.undiminished = min(self.step, fresh.tokens) if self.is_open else fresh.tokens
        urgent, batch = self.split([*self.begun, *self.waiting])
        self.urgent, self.batch = urgent, batch
        self.used = [sum(rows.get(r.uid, 0) for r in some) for some in (urgent, batch)]
        self.stuck = self._stuck()

    def is_interactive(self, request: Request) -> bool:
        return request.priority <= self.interactive

    def split(self, requests: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the interactive and the batch requests."""
        return [r for r in requests if self.is_interactive(r)], [r for r in requests if not self.is_interactive(r)]

    def _stuck(self) -> list[Request]:
        """Return the waiting interactive requests from the first on that finds no room, however many tokens it had."""
        probe = self.fresh.copy()
        for r in self.decoding:
            probe.grant(r, 1)
        probe.tokens = UNLIMITED
        urgent = [r for r in self.urgent if isinstance(r, Waiting)]
        for i, w in enumerate(urgent):
            if not probe.grant(w, 1):
                return list(urgent[i:])
        return []

    @property
    def has_room(self) -> bool:
        """Whether all waiting requests would find pages and rows beside each other."""
        probe = self.fresh.copy()
        for r in self.decoding:
            probe.grant(r, 1)
        probe.tokens = UNLIMITED
        return all(probe.grant(w, 1) for w in self.waiting)

    def check_rows(self) -> None:
        """Check each row: a known request, tokens that were granted, every decode row, no common prefix."""
        for uid, n in self.rows.items():
            if uid not in self.views:
                raise self.broken("raises", "The rows of a plan name open requests.", f"No request has uid {uid}.")
            if uid in self.retract:
                raise self.broken("keeps-row", "A retracted request has no row.", f"Request {uid} has one.", uid)
            _, granted = self.asked.get(uid, (0, 0))
            most = max(wanted(self.views[uid]), 1) if self.retract else granted
            if n < 1 or n > most:
                seen = f"The row has {n} tokens; `budget.grant` granted {granted}."
                if self.retract:
                    seen = f"The row has {n} tokens; the request has {most} to compute."
                raise self.broken("ignores-grant", "A row has no more tokens than the budget granted.", seen, uid)
            same = getattr(self.views[uid], "same_prefix_req", None)
            if same is not None:
                seen = f"Request {uid} was admitted, although request {same} is about to compute the same page."
                raise self.broken("same-prefix", "A common prefix is computed once.", seen, uid)
        if not self.retract:
            budget = self.fresh.copy()
            for r in self.decoding:
                if budget.grant(r, 1) and r.uid not in self.rows:
                    seen = f"Request {r.uid} decodes, and the page of its next token is free, but it has no row."
                    later = [v for v in self.decoding if v.uid in self.rows and urgency(v) > urgency(r)]
                    if r.num_new_pages and any(v.num_new_pages for v in later):
                        seen = f"Request {r.uid} decodes, and has no row. Request {later[-1].uid}, which is less "
                        seen += "urgent, got the page."
                        promise = "If pages are short, the most urgent requests that decode get theirs first."
                        raise self.broken("decode-order", promise, seen, r.uid)
                    raise self.broken("decodes", "Every request that decodes has a row in every step.", seen, r.uid)

    def check_room(self) -> None:
        """Check what is retracted, and that no batch request takes the room of an interactive one."""
        named = {r.uid for r in self.running}
        for uid in self.retract:
            if uid not in named:
                promise = "`retract` names running requests."
                raise self.broken("victims", promise, f"Request {uid} does not run.", uid)
            if self.is_interactive(self.views[uid]):
                seen = f"Request {uid} is interactive, and was retracted."
                raise self.broken("victims", "Only batch requests are retracted.", seen, uid)
        if not self.stuck:
            if self.retract:
                seen = f"Requests {self.retract} were retracted, and every waiting interactive request fits."
                raise self.broken("needless", "Requests are retracted only for interactive ones without room.", seen)
            return
        urgent, batch = self.split(sorted(self.running, key=urgency))
        every = [r for r in self.urgent if isinstance(r, Waiting)]
        # The rules retract for all waiting prompts. Leaving out those behind the first without room is accepted.
        first_stuck = every[: [w.uid for w in every].index(self.stuck[0].uid) + 1]
        found = [self.fresh.retractions([*urgent, *some, *batch]) for some in (every, first_stuck)]
        expected = max(found, key=len)
        if set(self.retract) != set(expected[: len(self.retract)]) or len(set(self.retract)) < len(self.retract):
            seen = f"Requests {self.retract} were retracted; the right ones are {expected or 'none'}."
            cause = "needless" if set(self.retract) > set(expected) else "victims"
            raise self.broken(cause, "As few batch requests as possible are retracted, the least urgent ones.", seen)
        self.check_enough(urgent, every, batch, expected)
        first = self.stuck[0]
        before = self.urgent[: self.urgent.index(first)]
        full = self.used[0] >= self.least - self.kept and first.uid not in self.rows
        if full or any(self.rows.get(r.uid, 0) < wanted(r) for r in before):
            return  # the step has no token for the request
        if self.retract and first.uid not in self.rows:
            seen = f"Requests {self.retract} were retracted for the interactive request {first.uid}, which has no row."
            raise self.broken("waits", "The request that gets the room has a row.", seen, first.uid)
        if all(found) and not self.retract:
            seen = f"Request {first.uid} is interactive and finds no room; the batch requests {expected} have it."
            raise self.broken(
                "waits", "A waiting interactive request gets the room of batch requests.", seen, first.uid
            )
        self.check_winners(urgent, every, batch)
        for r in self.batch:
            if isinstance(r, Waiting) and r.uid in self.rows:
                seen = f"Request {r.uid} was admitted while the interactive request {first.uid} found no room."
                promise = "No batch request is admitted while an interactive one waits for room."
                raise self.broken("takes-room", promise, seen, r.uid)

    def check_enough(self, urgent: list[Any], every: list[Waiting], batch: list[Any], expected: Sequence[int]) -> None:
        """Check that enough requests are retracted: exactly those whose room a run of waiting prompts needs."""
        named = set(self.retract)
        if not named or named == set(expected):
            return
        first = [w.uid for w in every].index(self.stuck[0].uid)
        for end in range(first + 1, len(every) + 1):
            if named == set(self.fresh.retractions([*urgent, *every[:end], *batch])):
                return
        seen = f"Requests {self.retract} were retracted, which is too few for the interactive request "
        seen += f"{self.stuck[0].uid} or for a later one; {list(expected)} have the room."
        promise = "Enough batch requests are retracted for the interactive requests that they are retracted for."
        raise self.broken("waits", promise, seen, self.stuck[0].uid)

    def check_winners(self, urgent: list[Any], every: list[Waiting], batch: list[Any]) -> None:
        """Check that each request for which others were retracted has a row, as far as the tokens last."""
        if not self.retract or self.used[0] >= self.least - self.kept:
            return
        victims: set[int] = set()
        for end in range(1, len(every) + 1):
            found = set(self.fresh.retractions([*urgent, *every[:end], *batch]))
            if not found <= set(self.retract):
                return
            winner = every[end - 1].uid
            if len(found) > len(victims) and winner not in self.rows:
                seen = f"Requests {self.retract} were retracted; the interactive request {winner} gets room of them "
                seen += "and has no row, although the step has tokens left."
                raise self.broken("waits", "A request that gets the room has a row.", seen, winner)
            victims = found

    @property
    def kept(self) -> int:
        """Tokens kept for batch prompts: all that wait and all that have begun."""
        return min(int(self.share / 100 * self.limit + 1e-9), sum(map(wanted, self.batch)))

    @property
    def needed(self) -> int:
        """Tokens kept for batch prompts, of which the waiting ones need none if no row is free."""
        begun = [r for r in self.batch if isinstance(r, Running)]
        return self.kept if self.fresh.rows else min(self.kept, sum(map(wanted, begun)))

    def check_tokens(self) -> None:
        """Check the step's limit, and what each class gets of it."""
        total, count = sum(self.used), f"The step has {len(self.rows)} rows"
        if total > self.limit:
            seen = f"Prompts got {total} tokens; the step may compute {self.limit} beside its decode rows."
            late = total <= self.undiminished
            promise = (
                "While an interactive request is open, prompts have `step_tokens` tokens less the decode rows, but at "
                "least a quarter of `step_tokens`."
            )
            if not self.is_open:
                promise = "A step computes no more tokens than the budget has."
            raise self.broken("decodes" if late else "limit", promise, seen)
        promise = "A step uses all of its prompt tokens, if prompts want them."
        sums = [sum(map(wanted, some)) for some in (self.urgent, self.batch)]
        most = [min(sums[0], self.limit - self.kept), min(sums[1], self.kept)]
        if self.retract or not self.has_room:
            may = min(sums[0], self.limit - self.needed)
            if not self.stuck and not self.retract and self.used[0] < may:
                seen = f"Interactive prompts want {sums[0]} tokens and may have {may}; they got {self.used[0]}."
                seen += " No row is free for a waiting batch prompt." if self.needed < self.kept else ""
                raise self.broken("urgent", "Interactive prompts get all tokens but those that are kept.", seen)
            self.check_begun()
            return
        if self.used[1] < most[1] - (self.used[1] > 0 or self.kept == 0):
            seen = f"{self.kept} of {self.limit} prompt tokens are kept for batch prompts; these got {self.used[1]}."
            raise self.broken("share", "Batch prompts get the tokens that are kept for them.", seen)
        if self.used[0] < most[0]:
            seen = f"Interactive prompts want {sums[0]} tokens and may have {most[0]}; they got {self.used[0]}. "
            seen += f"The step may compute {self.limit} prompt tokens beside its decode rows."
            cause = "urgent" if self.used[1] > self.kept else "few"
            raise self.broken(cause, "Interactive prompts get all tokens but those that are kept.", seen)
        if total < min(self.limit, sum(sums)):
            cause = "small" if not self.is_open else "idle"
            if self.limit == -(-self.step // 4) and self.is_open and total < self.limit:
                cause = "quarter"
            seen = f"{count}; prompts want {sum(sums)} tokens and may have {self.limit}; they got {total}."
            raise self.broken(cause, promise, seen)

    def check_begun(self) -> None:
        """Check what the prompts get that are partly computed: they have their room, whether others find some or not.

        After a retraction, interactive prompts may get the kept tokens, and the tokens that were granted to retracted
        requests may stay unused.
        """
        urgent, batch = self.split([r for r in self.begun if r.uid not in self.retract])
        want = [sum(map(wanted, some)) for some in (urgent, batch)]
        got = [sum(self.rows.get(r.uid, 0) for r in some) for some in (urgent, batch)]
        if got[0] < min(want[0], self.least - self.kept):
            seen = f"Interactive prompts that have begun want {want[0]} tokens, and got {got[0]} of {self.least}."
            raise self.broken("few", "Interactive prompts get all tokens but those that are kept.", seen)
        mine = min(want[1], int(self.share / 100 * self.limit + 1e-9))
        if not self.retract and got[1] < mine - 1:
            seen = (
                f"{mine} of {self.limit} prompt tokens are kept for batch prompts that have begun; they got {got[1]}."
            )
            raise self.broken("share", "Batch prompts get the tokens that are kept for them.", seen)
        lost = sum(self.asked.get(uid, (0, 0))[1] for uid in self.retract)
        if got[1] < want[1] and sum(self.used) + lost < self.least:
            seen = f"Batch prompts that have begun want {want[1]} tokens and got {got[1]}. "
            seen += f"The step may compute {self.least} prompt tokens, and has {sum(self.used)}."
            raise self.broken("idle", "Tokens that one class does not use belong to the other class.", seen)

    def check_order(self) -> None:
        """Check that in each class no prompt is served before a more urgent one is served completely."""
        spare = not (self.has_room or self.retract)  # tokens that were kept for prompts without room
        for requests in (self.urgent, self.batch):
            some = [r for r in requests if r.uid not in self.retract]
            for first, later in pairwise(some):
                if spare and isinstance(first, Waiting) and first.uid in self.rows:
                    continue  # it can't be granted a second time, so the next prompt may get them
                if self.rows.get(first.uid, 0) < wanted(first) and later.uid in self.rows:
                    seen = f"Request {later.uid} got tokens, and request {first.uid}, which comes before it, "
                    seen += f"got {self.rows.get(first.uid, 0)} of {wanted(first)}."
                    promise = "In a class, begun prompts come first, then waiting ones, in order of urgency."
                    raise self.broken("overtakes", promise, seen, later.uid)
