"""Lab `policy`: each plan is held against what the step had room for, then whole runs against exact counts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from minisgl.course.lab.grader.conformance import conformance, greedy
from minisgl.course.lab.grader.gate import Broken, Gate, Invalid, Student
from minisgl.course.lab.grader.search import search
from minisgl.course.lab.grader.server_gate import facts
from minisgl.course.lab.grader.simulated_workloads import (
    Gaps,
    jobs_of,
    least_prefill,
    random_workload,
    shipped_cache,
    show,
    simulate,
)
from minisgl.scheduler import Plan, Running, Waiting
from minisgl.scheduler.budget import AdmissionCost, StepBudget
from minisgl.testing.drive import make_plugin

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
        wanted, granted = self.asked.get(who.uid, (0, 0))
        self.asked[who.uid] = (wanted + want, granted + got)
        return got


def copy(budget: StepBudget) -> StepBudget:
    """A budget with as much left."""
    return StepBudget(budget.tokens, budget.rows, budget.pages, budget.reserved_pages, budget.admission_cost)


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
        for uid in rows:
            if sum(uid == other for other, _ in plan.rows) > 1:
                raise self._broken("twice", "A request has one row.", f"Request {uid} has several.", uid)
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
        queue = sorted(waiting, key=lambda w: -w.num_cached_tokens) if judge.order == "lpm" else waiting
        self.queue = [w for w in queue if w.same_prefix_req is None]
        self.views: dict[int, Running | Waiting] = {r.uid: r for r in running}
        self.views |= {w.uid: w for w in waiting}
        self.decoding = [r for r in running if not r.num_remaining_tokens]
        self.begun = [r for r in running if r.num_remaining_tokens]
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
        want = _left(who) if isinstance(who, Waiting) else who.num_remaining_tokens or 1
        return budget.grant(who, want) > 0

    def check_running(self) -> None:
        """Answers first, then begun prompts."""
        pages = self.fresh.pages - sum(r.num_new_pages for r in self.decoding if r.uid in self.rows)
        for r in self.decoding:
            if r.uid not in self.rows and r.num_new_pages <= pages:
                self._wrong_amount(r, 1)
                seen = f"Request {r.uid} runs, its next token would fit, and it has no row."
                raise self.broken("decodes-late", "Every running answer is in every step.", seen, r.uid)
        for r in self.begun:
            room = self.fresh.tokens - self.spent
            got = self.rows.get(r.uid, 0)
            if got == r.num_remaining_tokens:
                continue
            if room > 0 or (not got and any(w.uid in self.rows for w in self.queue)):
                self._wrong_amount(r, r.num_remaining_tokens)
                left = f"{room} tokens of the budget were unused"
                seen = f"Request {r.uid} has {r.num_remaining_tokens} prompt tokens left; it got {got}, and {left}."
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
                lpm = self.judge.order == "lpm" and w.num_cached_tokens < left_out.num_cached_tokens
                # By the other order, and not because it is smaller.
                fcfs = (
                    self.judge.order == "fcfs"
                    and w.num_cached_tokens > left_out.num_cached_tokens
                    and _left(w) >= _left(left_out)
                )
                before = "which comes before it" + (f" with order={self.judge.order}" if lpm or fcfs else "")
                seen = f"Request {b} was seated, and request {a}, {before}, was not."
                asked = list(self.asked)
                sooner = a not in asked or (b in asked and asked.index(b) < asked.index(a))
                cause = "order" if (lpm or fcfs) and sooner else "skips"
                raise self.broken(cause, "Nobody is overtaken by one that came later.", seen, a)
        budget = copy(self.fresh)
        for uid in self.asked:  # in the order in which they asked
            if uid in self.rows:
                budget.grant(self.views[uid], self.rows[uid])
        for w in self.queue:
            got = self.rows.get(w.uid)
            if got is None or got < _left(w):
                if got is not None and budget.tokens <= 0:
                    return
                if got is not None or self.would_fit(w, budget):
                    self._wrong_amount(w, _left(w))
                    if got is None:
                        seen = f"Request {w.uid} waits, would fit, and was not seated."
                        twins = any(getattr(self.views[uid], "twin", None) is not None for uid in self.asked)
                        raise self.broken("twins" if twins else "idle", "Whoever fits is seated.", seen, w.uid)
                return


def _left(w: Waiting) -> int:
    """Tokens that it has to compute."""
    return w.num_tokens - w.num_cached_tokens


def make(rng: random.Random, size: int) -> dict[str, Any]:
    """A workload. Or one step that few workloads come to: with one slot free, who comes first is not who comes first by
    the other order (``waiting``: cached tokens and tokens to compute of each); or more answers run than a step has
    tokens (the scheduler may seat one beside a policy's rows), or some find no page for their next token (``answers``:
    how many each needs)."""
    order = rng.choice(ORDERS)
    if 2 <= size <= 3:
        order = ORDERS[size % 2]
        cached = sorted(rng.sample(range(1, 40), 3))
        waiting = [[n, 50 - n if order == "lpm" else 10 + n] for n in cached]
        return {"answers": [], "begun": 0, "waiting": waiting, "slots": 1, "pages": 0, "chunk": 64, "order": order}
    if 4 <= size <= 7:
        answers = rng.sample([0, 0, 0, 1, 1, 1], 6)
        step = {"answers": answers, "begun": 5, "waiting": [], "slots": 0}
        return {**step, "pages": size % 2, "chunk": rng.randint(1, 3), "order": order}
    return {**random_workload(rng, size), "order": order, "cache": rng.choice(["naive", "radix"])}


def run_plan(student: Student, workload: dict[str, Any]) -> None:
    judge = Judge(student.make(student.config(order=workload["order"])), workload["order"])
    if "answers" in workload:
        return run_step(judge, workload)
    simulate(workload, shipped_cache(workload["cache"], workload["page_size"]), judge, causes=waits)


def run_step(judge: Judge, workload: dict[str, Any]) -> None:
    if workload["chunk"] < 1 or any(len(sizes) != 2 or not sizes[1] for sizes in workload["waiting"]):
        raise Invalid
    running = [Running(uid, 0, need, 0, uid) for uid, need in enumerate(workload["answers"], 1)]
    if workload["begun"]:
        running.append(Running(len(running) + 1, workload["begun"], 0, 0, len(running) + 1))
    waiting = [Waiting(uid, uid, cached + left, cached, None, 0)
               for uid, (cached, left) in enumerate(workload["waiting"], len(running) + 1)]  # fmt: skip
    free = StepBudget(workload["chunk"], workload["slots"], workload["pages"], 0, lambda uid: AdmissionCost(0, 0))
    judge.plan(waiting, running, free)


def show_plan(workload: dict[str, Any]) -> str:
    order = "scheduler.order=lpm, " if workload["order"] == "lpm" else ""
    if "answers" not in workload:
        return order + show(workload)
    free = f"free pages: {workload['pages']}, free slots: {workload['slots']}"
    lines = [f"{order}one step of {workload['chunk']} tokens, {free}"]
    lines += [f"request {i}: runs, needs {need} pages" for i, need in enumerate(workload["answers"], 1)]
    if workload["begun"]:
        lines.append(f"request {len(lines)}: has {workload['begun']} prompt tokens to compute")
    for cached, left in workload["waiting"]:
        lines.append(f"request {len(lines)}: waits, {cached} prompt tokens cached, {left} to compute")
    return "\n".join(lines)


def make_long(rng: random.Random, size: int) -> dict[str, Any]:
    """Answers run when a prompt of many chunks comes, and another one behind it."""
    chunk = rng.choice([4, 6, 8, 16])
    jobs = [{"id": i + 1, "stem": 0, "shared": 0, "own": rng.randint(1, 4), "answer": rng.randint(8, 30),
             "arrive": i % 3} for i in range(1 + min(size, 4))]  # fmt: skip
    jobs.append(
        {"id": 8, "stem": 0, "shared": 0, "own": chunk * rng.randint(2, 8), "answer": 2, "arrive": rng.randint(3, 6)}
    )
    jobs.append({"id": 9, "stem": 0, "shared": 0, "own": rng.randint(1, 3 * chunk), "answer": 4, "arrive": 7})
    return {"page_size": 4, "pages": 200, "slots": 8, "chunk": chunk, "jobs": jobs, "order": "fcfs", "cache": "naive"}


def run_gap(student: Student, workload: dict[str, Any]) -> None:
    """The pool holds all: every answer gains a token in every step, and no step is longer than a chunk."""
    policy = student.make(student.config(order="fcfs"))
    running = len(workload["jobs"])
    if workload["chunk"] <= running or workload["slots"] < running or workload["pages"] < 200:
        raise Invalid
    gaps, chunk = Gaps(), workload["chunk"]
    simulate(workload, shipped_cache("naive", workload["page_size"]), policy, overlap=False, hook=gaps.relay)
    if gaps.worst > chunk:
        promise = f"Between two tokens of an answer at most a chunk of {chunk} tokens is computed."
        raise Broken("decodes-late", promise, f"{gaps.worst} tokens were, and the pool had room for all.")


def count_gap(student: Student) -> str:
    """The course's picture: sixteen answers run when a prompt of 1,200 tokens comes. The worst gap, in tokens."""
    rng, chunk = student.random, 128
    jobs = [{"id": i + 1, "stem": 0, "shared": 0, "own": rng.randint(4, 40), "answer": rng.randint(40, 80), "arrive": i}
            for i in range(15)]  # fmt: skip
    jobs.append({"id": 99, "stem": 0, "shared": 0, "own": 1200, "answer": 8, "arrive": 20})
    workload = {"page_size": 16, "pages": 400, "slots": 16, "chunk": chunk, "jobs": jobs}
    gaps = {}
    for name, policy in (("prefill_first", make_plugin("scheduler", "prefill_first")), ("yours", student.make())):
        meter = Gaps()
        simulate(workload, shipped_cache("naive", 16), policy, overlap=False, hook=meter.relay)
        gaps[name] = meter.worst
    if gaps["yours"] > chunk:
        promise = f"The worst gap is one chunk: {chunk} tokens."
        raise Broken("decodes-late", promise, f"It is {gaps['yours']} tokens.", workload=workload, show=show(workload))
    return f"worst gap {gaps['yours']} tokens; {gaps['prefill_first']} with prefill_first"


def count_prefill(student: Student) -> str:
    """A class of twelve asks about two handbooks at once. Whoever waits a step finds them cached."""
    rng = student.random
    jobs = [{"id": i + 1, "stem": i % 2, "shared": 256, "own": rng.randint(4, 20), "answer": 6, "arrive": i // 8}
            for i in range(12)]  # fmt: skip
    workload = {"page_size": 16, "pages": 400, "slots": 16, "chunk": 128, "jobs": jobs}
    least = least_prefill(jobs_of(workload), 16)
    prefilled = simulate(workload, shipped_cache("radix", 16), student.make(), causes=waits).counts.prompt_tokens
    if prefilled > 1.02 * least:
        promise = f"With a cache at most 1.02 times the least possible is prefilled: {least} tokens."
        raise Broken("twins", promise, f"{prefilled} were.", workload=workload, show=show(workload))
    return f"prefilled {prefilled} tokens, least possible {least}"


def count(student: Student) -> str:
    return f"{count_gap(student)}; {count_prefill(student)}"


def policy_kit() -> type:
    from minisgl.testing.policy import PolicyConformance

    return PolicyConformance


def waits(text: str) -> str | None:
    """Causes of what the kit and the scheduler say."""
    if "asked twice" in text:
        return "impure"
    if "empty plans" in text or "stuck" in text:
        return "empty"
    return "ignores-grant" if "the plan" in text else None


GATES = (
    Gate(
        "plan",
        "each step has the rows that it should",
        search(make, run_plan, seconds=1.0, show=show_plan),
        part="policy.plan",
    ),
    conformance(policy_kit, lambda student: student.make(), causes=waits, runs=12),
    Gate("promises", "no answer waits for a prompt", search(make_long, run_gap, tries=20, seconds=0.8, show=show)),
    Gate("counts", "the worst gap is one chunk, and nothing shared is computed twice", count),
    greedy(["scheduler=prefill_first"], ["max_prefill_tokens=32"]),
    facts(["plan"]),
)
