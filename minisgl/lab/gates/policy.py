"""Lab `policy`: each plan is held against what the step had room for, then whole runs against exact counts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from minisgl.lab.gate import Broken, Gate, Student, search
from minisgl.lab.served import facts
from minisgl.lab.sim import random_workload, shipped_cache, show, simulate
from minisgl.scheduler import Plan, Running, Waiting
from minisgl.scheduler.budget import StepBudget

ORDERS = ("fcfs", "lpm")


class Recorded:
    """The step's budget, and what was asked of it: uid → (wanted, granted)."""

    def __init__(self, budget: StepBudget):
        self._budget = budget
        self.asked: dict[int, tuple[int, int]] = {}

    @property
    def tokens(self) -> int:
        return self._budget.tokens

    @property
    def rows(self) -> int:
        return self._budget.rows

    def grant(self, who: Waiting | Running, want: int) -> int:
        got = self._budget.grant(who, want)
        self.asked[who.uid] = (want, got)
        return got


def copy(budget: StepBudget) -> StepBudget:
    """A budget with as much left."""
    return StepBudget(budget.tokens, budget.rows, budget.pages, budget.reserve, budget.cost)


class Judge:
    """A policy that asks the student's, twice, and judges the answer."""

    def __init__(self, policy: Any, order: str):
        self.policy, self.order = policy, order
        self.steps = 0

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: StepBudget) -> Plan:
        fresh, again = copy(budget), Recorded(copy(budget))
        recorded = Recorded(budget)
        plan = self.policy.plan(waiting, running, recorded)
        if not isinstance(plan, Plan):
            raise self._broken("raises", "plan returns a Plan.", f"It returned {plan!r:.60}.")
        rows = dict(plan.rows)
        if dict(self.policy.plan(waiting, running, again).rows) != rows:
            raise self._broken(
                "impure", "A plan depends on its arguments alone.", "Asked again, it answered otherwise."
            )
        step = _Step(self, rows, recorded.asked, list(waiting), list(running), fresh)
        step.check_rows()
        step.check_running()
        step.check_waiting()
        self.steps += 1
        return plan

    def _broken(self, cause: str, promise: str, seen: str, request: int | None = None) -> Broken:
        return Broken(cause, promise, seen, step=self.steps, request=request)


class _Step:
    """One plan, and what it was made from. ``fresh`` is the budget as it was."""

    def __init__(
        self,
        judge: Judge,
        rows: dict[int, int],
        asked: dict[int, tuple[int, int]],
        waiting: list[Waiting],
        running: list[Running],
        fresh: StepBudget,
    ):
        self.judge, self.rows, self.asked, self.running, self.fresh = judge, rows, asked, running, fresh
        queue = sorted(waiting, key=lambda w: -w.cached) if judge.order == "lpm" else waiting
        self.queue = [w for w in queue if w.twin is None]
        self.views: dict[int, Running | Waiting] = {r.uid: r for r in running}
        self.views |= {w.uid: w for w in waiting}
        self.decoding = [r for r in running if not r.left]
        self.begun = [r for r in running if r.left]
        self.spent = sum(rows.values())

    def broken(self, cause: str, promise: str, seen: str, request: int | None = None) -> Broken:
        return self.judge._broken(cause, promise, seen, request)

    def check_rows(self) -> None:
        """What a row says was granted."""
        for uid, n in self.rows.items():
            if uid not in self.views:
                raise self.broken("raises", "Rows name requests that were shown.", f"There is no request {uid}.", uid)
            wanted, granted = self.asked.get(uid, (0, 0))
            if n != granted:
                seen = f"The row has {n} tokens; of {wanted} asked for, {granted} were granted."
                raise self.broken("ignores-grant", "A row takes what was granted.", seen, uid)
        if not self.rows:
            could: list[Running | Waiting] = [*self.running]
            could += self.queue[:1]
            first = next((v for v in could if self.would_fit(v, copy(self.fresh))), None)
            if first is not None:
                seen = f"The plan is empty, and request {first.uid} could compute."
                raise self.broken("empty", "A step in which something could be computed is not empty.", seen, first.uid)

    def would_fit(self, who: Running | Waiting, budget: StepBudget) -> bool:
        want = who.length - who.cached if isinstance(who, Waiting) else who.left or 1
        return budget.grant(who, want) > 0

    def check_running(self) -> None:
        """Answers first, then begun prompts."""
        pages = self.fresh.pages - sum(r.new_pages for r in self.decoding if r.uid in self.rows)
        for r in self.decoding:
            if r.uid not in self.rows and r.new_pages <= pages:
                self._wrong_amount(r, 1)
                seen = f"Request {r.uid} runs, its next token would fit, and it has no row."
                raise self.broken("decodes-late", "Every running answer is in every step.", seen, r.uid)
        for r in self.begun:
            room = self.fresh.tokens - self.spent
            got = self.rows.get(r.uid, 0)
            if got == r.left:
                continue
            if room > 0 or (not got and any(w.uid in self.rows for w in self.queue)):
                self._wrong_amount(r, r.left)
                seen = f"Request {r.uid} has {r.left} prompt tokens to compute, got {got}, and {room} were left over."
                raise self.broken("forgets", "A prompt that was begun goes on before others are seated.", seen, r.uid)
        decodes = sum(r.uid in self.rows for r in self.decoding)
        most = max(self.fresh.tokens, decodes)
        if self.spent > most:
            seen = (
                f"The step computes {self.spent} tokens, and {most} were to be had: prompts asked before answers did."
            )
            raise self.broken("decodes-late", "A step computes no more than max_prefill_tokens.", seen)

    def _wrong_amount(self, who: Running | Waiting, right: int) -> None:
        """Whether it was left out because the wrong number was asked for."""
        wanted, _ = self.asked.get(who.uid, (right, 0))
        if wanted < right:
            seen = f"Request {who.uid} has {right} tokens to compute; {wanted} were asked for."
            raise self.broken("tokens-for-pages", "Each asks for the tokens that it has to compute.", seen, who.uid)

    def check_waiting(self) -> None:
        """In order, none passed over, and nobody left out who fits."""
        left_out: Waiting | None = None
        for w in self.queue:
            if w.uid not in self.rows:
                left_out = left_out or w
            elif left_out is not None:
                a, b = left_out.uid, w.uid
                other = self.judge.order == "lpm" and w.cached < left_out.cached
                seen = f"Request {b} was seated, and request {a}, which comes before it, was not."
                cause = "order" if other and a not in self.asked else "skips"
                raise self.broken(cause, "Nobody is overtaken by one that came later.", seen, a)
        budget = copy(self.fresh)
        for uid, n in self.rows.items():
            budget.grant(self.views[uid], n)
        for w in self.queue:
            got = self.rows.get(w.uid)
            if got is None or got < w.length - w.cached:
                if got is not None and budget.tokens <= 0:
                    return
                if got is not None or self.would_fit(w, budget):
                    self._wrong_amount(w, w.length - w.cached)
                    if got is None:
                        seen = f"Request {w.uid} waits, would fit, and was not seated."
                        raise self.broken("idle", "Whoever fits is seated.", seen, w.uid)
                return


def make(rng: random.Random, size: int) -> dict[str, Any]:
    return {**random_workload(rng, size), "order": rng.choice(ORDERS), "cache": rng.choice(["naive", "radix"])}


def run_plan(student: Student, workload: dict[str, Any]) -> None:
    cache = shipped_cache(workload["cache"], workload["page_size"])
    judge = Judge(student.make(student.config(order=workload["order"])), workload["order"])
    simulate(workload, cache, judge)


GATES = (
    Gate("plan", "each step has the rows that it should", search(make, run_plan, show=show), part="policy.plan"),
    facts(["plan"]),
)
