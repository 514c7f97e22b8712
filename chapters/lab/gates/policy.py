"""Gates of lab `policy`: each plan is compared with the step's budget, and whole runs with exact counts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, zip_longest
from typing import Any

from minisgl.chapters.lab.grader.asked_policy import Recorded, check_memory, well_formed_plan
from minisgl.chapters.lab.grader.conformance import conformance, greedy
from minisgl.chapters.lab.grader.gate import Broken, Gate, Invalid, Stretch, Student, amount
from minisgl.chapters.lab.grader.search import search
from minisgl.chapters.lab.grader.server_gate import facts
from minisgl.chapters.lab.grader.simulated_workloads import (
    Gaps,
    jobs_of,
    least_prefill,
    random_workload,
    shipped_cache,
    show,
    simulate,
)
from minisgl.plugins.scheduler import LPM_WINDOW, order_waiting
from minisgl.scheduler import Plan, Running, Waiting
from minisgl.scheduler.cache_manager import AdmissionCost
from minisgl.scheduler.planner import StepBudget, WaitingView
from minisgl.testing.drive import make_plugin

ORDERS = ("fcfs", "lpm")


class Judge:
    """A policy that asks the student's policy twice for each step, and a new one once, and checks the plan.

    ``make`` builds the student's policy with an order. A process may have several policies: one with the other order is
    built after the judged one.
    """

    def __init__(self, make: Callable[[str], Any], order: str):
        self.policy, self.make, self.order = make(order), make, order
        self.other = make(ORDERS[1 - ORDERS.index(order)])
        self.steps = 0

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: StepBudget) -> Plan:
        """Return the student's plan. Raise `Broken` if it is wrong."""
        fresh, again = budget.copy(), Recorded(budget.copy())
        recorded = Recorded(budget)
        plan = well_formed_plan(self.policy, waiting, running, recorded, self._broken)
        rows = dict(plan.rows)
        if dict(self.policy.plan(waiting, running, again).rows) != rows:
            seen = "A second call of `plan` with the same arguments returned another plan."
            raise self._broken("impure", "A plan depends only on the arguments of `plan`.", seen)
        if dict(self.make(self.order).plan(waiting, running, Recorded(fresh.copy())).rows) != rows:
            seen = (
                "A new policy object returned another plan for the same arguments: the first one remembers earlier "
                "steps, or shares data with another policy of the process."
            )
            raise self._broken("remembers", "A plan depends only on the arguments of `plan`.", seen)
        if self.steps % 4 == 0:
            policies = self.policy, self.make(self.order)
            check_memory(plan, policies, list(waiting), list(running), lambda: Recorded(fresh.copy()), self._broken)
        step = _Step(self, rows, recorded.asked, list(waiting), list(running), fresh)
        step.check_rows()
        step.check_running()
        step.check_waiting()
        step.check_admissions()
        if plan.retract:
            seen = f"The plan retracts the requests {list(plan.retract)[:6]}."
            raise self._broken("forgets", "A request that owns KV pages gets on: this policy retracts none.", seen)
        self.steps += 1
        return plan

    def _broken(self, cause: str, promise: str, seen: str, request: int | None = None) -> Broken:
        return Broken(cause, promise, seen, step=self.steps, request=request)


class _Step:
    """One plan, with the requests and the budget that it was made from. ``fresh`` is the budget before the plan."""

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
        self.waiting = waiting
        queue = sorted(waiting, key=lambda w: -w.num_cached_tokens) if judge.order == "lpm" else waiting
        self.queue = [w for w in queue if w.same_prefix_req is None]
        self.views: dict[int, Running | Waiting] = {r.uid: r for r in running}
        self.views |= {w.uid: w for w in waiting}
        self.decoding = [r for r in running if not r.num_remaining_tokens]
        self.begun = [r for r in running if r.num_remaining_tokens]
        left = fresh.copy()
        for r in self.decoding:
            if r.uid in rows:
                left.grant(r, 1)
        self.prompt_tokens = left.tokens  # tokens of the step that its decode rows leave to prompts
        decoding = {r.uid for r in self.decoding}
        self.spent = sum(n for uid, n in rows.items() if uid not in decoding)  # tokens that prompts got

    def broken(self, cause: str, promise: str, seen: str, request: int | None = None) -> Broken:
        """Return a finding at the current step."""
        return self.judge._broken(cause, promise, seen, request)

    def check_rows(self) -> None:
        """Check that each row has the number of tokens that the budget granted, and that the plan is not empty."""
        for uid, n in self.rows.items():
            if uid not in self.views:
                promise = "The rows of a plan name waiting or running requests."
                raise self.broken("raises", promise, f"No request has the uid {uid}.", uid)
            wanted, granted = self.asked.get(uid, (0, 0))
            if n < 1:
                seen = f"The row of request {uid} has {amount(n, 'token')}: `budget.grant` granted none."
                raise self.broken("ignores-grant", "Each row has at least one token.", seen, uid)
            if n != granted:
                asked = (
                    f"was asked for {wanted} and granted {granted}" if uid in self.asked else "was never asked for it"
                )
                seen = f"The row of request {uid} has {amount(n, 'token')}; `budget.grant` {asked}."
                raise self.broken("ignores-grant", "A row has as many tokens as the budget granted.", seen, uid)
        if not self.rows:
            could: list[Running | Waiting] = [*self.running]
            could += self.queue[:1]
            first = next((v for v in could if self.would_fit(v, self.fresh.copy())), None)
            if first is not None:
                seen = f"The plan is empty, although the budget has tokens for request {first.uid}."
                raise self.broken("empty", "A plan is empty only if no request can compute.", seen, first.uid)

    def would_fit(self, req: Running | Waiting, budget: StepBudget) -> bool:
        """Return whether the budget grants the request any tokens."""
        want = _uncached(req) if isinstance(req, Waiting) else req.num_remaining_tokens or 1
        return budget.grant(req, want) > 0

    def fitted(self, req: Waiting, later: int) -> bool:
        """Return whether a request that was left out would have got tokens before the request ``later`` did."""
        budget = self.fresh.copy()
        for uid in self.asked:
            if uid == later:
                break
            if uid in self.rows:
                budget.grant(self.views[uid], self.rows[uid])
        return self.would_fit(req, budget)

    def check_running(self) -> None:
        """Check that decode rows come first and that running prefills come before admissions."""
        pages = self.fresh.pages - sum(r.num_new_pages for r in self.decoding if r.uid in self.rows)
        for r in self.decoding:
            if r.uid not in self.rows and r.num_new_pages <= pages:
                self._wrong_amount(r, 1)
                seen = f"Request {r.uid} decodes and its next token fits into the step, but the plan has no row for it."
                raise self.broken("decodes-late", "Every request that decodes has a row in every step.", seen, r.uid)
        for r in self.begun:
            room = self.prompt_tokens - self.spent
            got = self.rows.get(r.uid, 0)
            if got == r.num_remaining_tokens:
                continue
            asked_less = self.asked.get(r.uid, (0, 0))[0] < r.num_remaining_tokens
            if room > 0 or ((not got or asked_less) and any(w.uid in self.rows for w in self.queue)):
                self._wrong_amount(r, r.num_remaining_tokens)
                rest = amount(r.num_remaining_tokens, "prompt token")
                seen = f"Request {r.uid} has {rest} left and got {got}. Unused in the budget: {amount(room, 'token')}."
                promise = "A prefill that has begun continues before waiting requests are admitted."
                raise self.broken("forgets", promise, seen, r.uid)
        if self.spent > self.prompt_tokens:
            seen = (
                f"Prompts got {amount(self.spent, 'token')} of the step; its decode rows leave them "
                f"{self.prompt_tokens}: prompts were granted tokens before answers."
            )
            raise self.broken("decodes-late", "Prompts get the tokens that the decode rows of the step leave.", seen)

    def _wrong_amount(self, req: Running | Waiting, right: int) -> None:
        """Raise `Broken` if the policy asked the budget for fewer tokens than the request has to compute."""
        wanted, _ = self.asked.get(req.uid, (right, 0))
        if wanted < right:
            seen = f"Request {req.uid} has {amount(right, 'token')} to compute; `budget.grant` was asked for {wanted}."
            promise = "The policy asks for all tokens that a request has to compute."
            raise self.broken("tokens-for-pages", promise, seen, req.uid)

    def check_waiting(self) -> None:
        """Check that requests are admitted in order, and that every waiting request that fits is admitted."""
        for w in self.waiting:
            if w.uid in self.rows and w.same_prefix_req is not None:
                seen = f"Request {w.uid} was admitted; request {w.same_prefix_req} is computing the same next page."
                promise = "A waiting request with a `same_prefix_req` is left out."
                raise self.broken("same-prefix", promise, seen, w.uid)
        left_out: Waiting | None = None
        for w in self.queue:
            if w.uid not in self.rows:
                left_out = left_out or w
            elif left_out is not None:
                a, b = left_out.uid, w.uid
                lpm = self.judge.order == "lpm" and w.num_cached_tokens < left_out.num_cached_tokens
                # Admitted because it comes first in the other order, and not because it is smaller.
                fcfs = (
                    self.judge.order == "fcfs"
                    and w.num_cached_tokens > left_out.num_cached_tokens
                    and _uncached(w) >= _uncached(left_out)
                )
                urgent = w.priority < left_out.priority  # admitted because it is more urgent
                before = "which comes before it" + (f" with order={self.judge.order}" if lpm or fcfs else "")
                before += ", whatever their priorities" * urgent
                seen = f"Request {b} was admitted, and request {a}, {before}, was not."
                asked = list(self.asked)
                sooner = a not in asked or (b in asked and asked.index(b) < asked.index(a))
                cause = "order" if (lpm or fcfs or urgent) and sooner else "skips"
                if cause == "skips" and self.fitted(left_out, b):
                    cause, seen = (
                        "passes-over",
                        f"{seen} Request {a} fitted into the step when request {b} was asked for.",
                    )
                raise self.broken(cause, "No waiting request is passed over for a later one.", seen, a)
        for w, after in pairwise(self.queue):
            if self.rows.get(w.uid, _uncached(w)) < _uncached(w) and after.uid in self.rows:
                self._wrong_amount(w, _uncached(w))
        budget = self.fresh.copy()
        for uid in self.asked:  # in the order of the policy's calls of `grant`
            if uid in self.rows:
                budget.grant(self.views[uid], self.rows[uid])
        for w in self.queue:
            got = self.rows.get(w.uid)
            if got is None or got < _uncached(w):
                if got is not None and budget.tokens <= 0:
                    return
                if got is not None or self.would_fit(w, budget):
                    self._wrong_amount(w, _uncached(w))
                    if got is None:
                        seen = f"Request {w.uid} waits and fits into the step, but was not admitted."
                        asked_reqs = [self.views[uid] for uid in self.asked]
                        same = any(getattr(req, "same_prefix_req", None) is not None for req in asked_reqs)
                        promise = "A waiting request that fits into the step is admitted."
                        raise self.broken("same-prefix" if same else "idle", promise, seen, w.uid)
                return

    def check_admissions(self) -> None:
        """Compare the admissions with those of a policy that grants in the right order, from the rows of this plan.

        Which decode rows get the last pages and which begun prompts get the last tokens is the student's choice: the
        text names no order. The queue of more than `LPM_WINDOW` requests with lpm is not compared for the same reason.
        """
        if self.judge.order == "lpm" and len(self.waiting) > LPM_WINDOW:
            return
        budget, right = self.fresh.copy(), dict[int, int]()
        for r in (*self.decoding, *self.begun):
            if r.uid in self.rows:
                budget.grant(r, self.rows[r.uid])
        for w in order_waiting(self.waiting, self.judge.order):
            got = budget.grant(w, _uncached(w))
            if not got:
                break
            right[w.uid] = got
        for w in self.waiting:
            got, must = self.rows.get(w.uid, 0), right.get(w.uid, 0)
            if got == must:
                continue
            seen = f"Request {w.uid} waits. It must get {amount(must, 'token')} of the step, and got {got}."
            promise = "Waiting requests are admitted in order, until the first one that does not fit."
            asked_all = self.asked.get(w.uid, (0, 0))[0] >= _uncached(w)
            both = "order" if asked_all else "tokens-for-pages"  # another request came first and got the tokens
            cause = "skips" if not must else "idle" if not got else both
            raise self.broken(cause, promise, seen, w.uid)


def _uncached(w: Waiting) -> int:
    """Return the number of prompt tokens that a waiting request has to compute."""
    return w.num_tokens - w.num_cached_tokens


def make(rng: random.Random, size: int) -> dict[str, Any]:
    """Return one of the `corner_steps`, each with both orders, and then random steps and workloads."""
    if size <= CORNERS:
        return corner_steps(rng, ORDERS[size % 2])[(size - 1) // 2]
    order, size = rng.choice(ORDERS), size - CORNERS + 3
    if size % 3:
        return {**random_step(rng, size), "order": order}
    return {**random_workload(rng, size), "order": order, "cache": rng.choice(["naive", "radix"])}


def corner_steps(rng: random.Random, order: str) -> list[dict[str, Any]]:
    """Return steps that random steps rarely reach, always of the same kinds. ``rng`` varies their numbers.

    The keys are those of `random_step`. ``waited``: the skipped steps of each waiting request. ``queue``: see
    `run_queue`.
    """

    def step(
        answers: list[int], begun: list[int], waiting: list[list[int]], slots: int = 6, pages: int = 40,
        chunk: int = 512, **more: Any,
    ) -> dict[str, Any]:  # fmt: skip
        given = {"answers": answers, "begun": begun, "waiting": waiting, "slots": slots, "pages": pages}
        return {**given, "chunk": chunk, "order": order, **more}

    def some(most: int = 60) -> int:
        return rng.randint(5, most)

    low, middle, high = sorted(rng.sample(range(1, 40), 3))
    chunk, rest = rng.randint(20, 90), rng.randint(1, 9)
    orders = [
        # one request can be admitted, and the orders disagree about which: most cached tokens, with the fewest or the
        # most to compute, or with the smaller share of its prompt
        step([], [], [[n, 50 - n if order == "lpm" else 10 + n] for n in (low, middle, high)], slots=1),
        step([], [], [[n, 10 + n if order == "lpm" else 50 - n] for n in (low, high, middle)], slots=1),
        step([0], [], [[high, 400], [low, 9], [0, 1]], slots=1),
        step([0], [], [[0, 9], [low, 9], [high, 400]], slots=1),
        step([], [], [[16, some()], [16, some()], [16, some()]], slots=2, turned=1),  # the same number of cached tokens
        # a request that has waited long, and a more urgent one: neither changes the order
        *(step([0], [], [[n, 30] for n in cached], slots=slots, waited=waited) for cached, slots, waited in (
            ([0, middle], 1, [600, 0]), ([high, low], 1, [0, 600]), ([high, 0, low], 2, [3, 100_000, 40]),
        )),
        step([0], [9], [[48 - 16 * place, 30] for place in range(4)], slots=rng.randint(1, 3), urgent=1, chunk=64),
        step([0], [9], [[16 * place, 30] for place in range(4)], slots=rng.randint(1, 3), urgent=1, chunk=64),
        step([0, 0], [chunk, chunk], [[16, 30]], chunk=chunk, skipped=1000, waited=[5_000]),
    ]  # fmt: skip
    answers = [
        # some answers find no page, and later ones need none; more answers than tokens
        step([0, 1, 0], [], [], pages=0),
        step([1, 0, 0], [], [], pages=0),
        step([1, 0], [rest], [[0, 9]], pages=0),
        step([1, 1, 0, 1, 0], [], [], pages=1, chunk=3),
        step([0, 1, 1, 0], [5], [], pages=1, chunk=rng.randint(1, 3)),
        step(rng.sample([0, 0, 0, 1, 1, 1], 6), [5], [], slots=0, pages=rng.randint(0, 1), chunk=rng.randint(1, 3)),
        step([1, 1], [], [], pages=0, chunk=64),
        step([0] * 8, [50], [[0, 20]], chunk=8),
        step([0] * 9, [50], [[0, 20]], chunk=8, prefill=2),
        step([0] * 9, [], [[0, 20], [16, 20]], chunk=8, prefill=2),
        # prompts between decode rows, or before them
        step([0] * 4, [1] * 5, [], slots=0, chunk=rng.randint(2, 5), mixed=-1),
        step([0, 0, 1], [300, 1], [[0, 50]], chunk=128, mixed=-1),
        step([0] * 3, [rest, 40, 9], [[0, 9], [16, 9]], chunk=60, mixed=rng.randint(1, 999)),
    ]
    few = [
        step([0], [], []),
        step([], [rest], []),
        step([], [], [[0, some()]]),
        # one token
        step([0], [1], [[0, 1]], chunk=1),
        step([], [1], [[0, 1]], chunk=1),
        step([], [], [[0, 1], [16, 1]], chunk=1),
        step([], [], [[0, 700], [16, 700]], chunk=1),
        step([], [1, 1], [[0, 1], [16, 1]], chunk=3),
        step([], [], []),
    ]
    begun = [
        # begun prompts leave no token, or one; a waiting request may be older than they are
        step([], [chunk], [[0, 40], [16, 9]], chunk=chunk),
        step([0], [chunk - 3, 1], [[0, 40], [16, 9]], chunk=chunk),
        step([], [chunk + some()], [[0, chunk]], chunk=chunk, first=0),
        step([0], [chunk, some()], [[0, some()], [16, chunk]], chunk=chunk, first=0, mixed=-1),
        step([], [chunk - rest], [[16, some()], [0, some()]], chunk=chunk, first=0, late=1),
        step([0, 0], [], [[0, 20], [16, 20]], first=0, late=1, slots=1),
        step([], [rest, rest], [[0, 20]], slots=0),
    ]
    room = [
        # the first request of either order needs more pages, or rows, than there are
        step([0], [], [[low, 100], [0, 16]], pages=2, priced=1),
        step([0], [], [[low, 16], [high, 100]], pages=2, priced=1),
        step([], [], [[low, 16], [middle, 100], [0, 16]], pages=3, priced=1),
        step([], [], [[0, 64]], pages=4, priced=1),
        step([0, 1], [], [[0, 48], [16, 32]], pages=5, priced=1, reserved=2),
        step([], [], [[0, 32], [0, 32], [0, 1]], pages=5, priced=1, growth=1),
        step([0], [], [[0, 20], [16, 20]], slots=0),
        step([], [], [[0, 20], [16, 300], [32, 300], [0, 2]], chunk=chunk + 90, priced=1),
        # the requests that wait behind it are more urgent than it is
        step([0], [], [[high, 100], [low, 9], [0, 9]], pages=2, priced=1, urgent=1),
    ]
    same = [
        # request 0 is about to compute the same page: it waits, or runs, or the policy can't see it
        step([], [40, 10], [[32, 20, -2], [0, 30, -1], [0, 9, -1]], first=0, late=1),
        step([0], [10], [[0, 30, -1], [32, 20, -2], [0, 9, -1]], first=0, late=1),
        step([], [40, 10], [[32, 20, -1], [32, 30, 0], [0, 9, -1]], first=0),
        step([], [], [[0, 20, -1], [48, 30, 0], [32, 9, 0]], first=0),
        step([], [40], [[32, 20, -3], [0, 30, -1], [0, 9, -1]]),
        step([], [], [[0, 20, -1], [32, 30, 0], [0, 9, 1], [16, 9, -1]], slots=3),
        # all are left out
        step([0], [rest], [[0, 20, -2]]),
        step([0], [], [[0, 20, -2], [16, 20, -2], [32, 9, 0]], first=0, late=1),
        step([], [], [[16, 20, -3], [0, 20, -3]]),
    ]
    queues = [
        {"queue": 10_000, "fits": fits, "slots": slots, "order": order}
        for fits, slots in ((0, 256), (0, 0), (rng.randint(1, 9), 20))
    ]
    large = [
        step([0] * 40, [900], [[rng.randint(0, 90), rng.randint(100, 700)] for _ in range(20)], slots=20, chunk=8192),
        # up to 1,100 rows and 300,000 tokens, and 300 prompts that are partly computed
        step([0] * (1_100 if order == "fcfs" else 300), [10_000],
             [[rng.randint(0, 900), rng.randint(1, 9), -1] for _ in range(100)], slots=256, chunk=60_000),
        step([0], [70_000], [[0, 80_000], [16, 130_000]], slots=2, chunk=300_000),
        step([], [], [[0, 9_000 + some()], [16, 20_000]], slots=2, chunk=40_000),
        step([], [10] * 300, [], slots=4, chunk=8192),
    ]  # fmt: skip
    # a long queue, of which all requests fit (fcfs), or a few with the longest prefixes (lpm)
    cached = rng.sample(range(1, 1_000), 220)
    cached = cached if order == "fcfs" else [*sorted(cached[:120]), *[0] * 100]
    large.append(step([], [], [[n, 9] for n in cached], slots=256 if order == "fcfs" else 4, chunk=8192))
    return [*few, *orders, *answers, *begun, *room, *same, *queues, *large]


CORNERS = 2 * len(corner_steps(random.Random(0), "fcfs"))
"""How many workloads are corner cases."""


def random_step(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a random step of a few requests, whose uids begin at ``first``.

    ``begun`` are the tokens left of each prompt that is partly computed. With ``turned``, the numbers of waiting
    requests fall in the order of arrival, and the last one to arrive has been skipped most often. The third number of
    a waiting request is the place in ``waiting`` of its ``same_prefix_req``, or -1: none, -2: the first running
    request, -3: a request that the policy does not see. With ``priced``, a waiting request needs a page for 16 tokens,
    and ``growth`` pages later. ``mixed``: the seed of the order of the running requests, whose prompts and decode rows
    are in any order (0: decode rows first; -1: a prompt before each decode row). ``skipped``: for how many steps each
    running request had no row.
    ``prefill``: how many tokens decode rows leave to prompts. ``reserved``: pages kept for running requests.
    ``urgent``: the priorities, which change nothing (0: all are 0; 1: each waiting request is more urgent than those
    before it; otherwise a seed).
    """
    chunk = rng.choice([3, 16, 50, 125, 128, 1000, 8192])
    most = rng.choice([chunk, 2 * chunk, max(chunk // 4, 1)])
    waiting = [
        [rng.choice([0, 0, 16, 32, 160]), rng.randint(1, most), rng.randrange(i) if i and rng.random() < 0.25 else -1]
        for i in range(rng.randint(0, 1 + min(size // 4, 12)))
    ]
    return {
        "answers": [rng.choice([0, 0, 0, 1]) for _ in range(rng.randint(0, 1 + min(size // 4, 20)))],
        "begun": [rng.choice([1, rng.randint(1, most)]) for _ in range(rng.choice([0, 1, 1, 2, 3, 12]))],
        "turned": rng.randint(0, 1),
        "waiting": waiting,
        "slots": rng.randint(0, 6),
        "pages": rng.randint(0, 40),
        "chunk": chunk,
        "first": rng.choice([0, 0, 1, 2**40]),
        "priced": rng.randint(0, 1),
        "growth": rng.choice([0, 0, 1, 2]),
        "mixed": rng.choice([0, rng.randint(1, 10**6)]),
        "skipped": rng.choice([0, 0, 1, 1000]),
        "prefill": rng.choice([0, 0, -(-chunk // 4)]),
        "reserved": rng.choice([0, 0, rng.randint(0, 10)]),
        "urgent": rng.choice([0, rng.randint(2, 10**6)]),
    }


def run_plan(student: Student, workload: dict[str, Any]) -> None:
    """Check every plan of the student's policy in a workload, or its plan for one step."""
    if "queue" in workload:
        return run_queue(student, workload)
    judge = Judge(lambda order: student.make(student.config(order=order)), workload["order"])
    if "answers" in workload:
        return run_step(judge, workload)
    simulate(workload, shipped_cache(workload["cache"], workload["page_size"]), judge, causes=cause_of)


MOST_READ = 512
"""How many waiting requests a plan with the order ``fcfs`` may read if the first ten do not all fit."""


def run_queue(student: Student, workload: dict[str, Any]) -> None:
    """Check the plan of a long queue, and count how many of its requests the plan reads.

    ``queue``: the number of waiting requests. ``fits``: how many of them get pages. With the order ``lpm``, the
    first ones have the longest prefix, and the number of requests that are read is free.
    """
    size, fits, slots = workload["queue"], workload["fits"], workload["slots"]
    if student.by_messages and size > MOST_READ:  # a list is then read as a whole before it is sent
        size = MOST_READ
    if fits > 100:
        raise Invalid
    read = 0

    def entries() -> Iterator[Waiting]:
        nonlocal read
        for uid in range(1, size + 1):
            read += 1
            yield Waiting(uid, uid, 400, max(160 - 16 * ((uid + 9) // 10), 0), None, 0)

    policy = student.make(student.config(order=workload["order"]))
    budget = StepBudget(8192, slots, 25 * fits, 0, lambda uid: AdmissionCost(25, 0))
    rows = dict(policy.plan(WaitingView(size, entries()), [], budget).rows)
    if read > MOST_READ and workload["order"] == "fcfs":
        seen = f"Request {min(fits, slots) + 1} did not fit, but the plan read {read:,} of {size:,} waiting requests."
        raise Broken("scan", "A plan with order=fcfs reads only the head of a long queue.", seen)
    right = range(1, min(fits, slots, size) + 1)
    if list(rows) != list(right):
        seen = f"The first {len(right)} of {size:,} waiting requests fit. The plan has rows for {list(rows)[:9]}."
        cause = "order" if len(rows) == len(right) else "skips" if len(rows) > len(right) else "idle"
        raise Broken(cause, "Waiting requests are admitted in order, until the first one that does not fit.", seen)


def requests_of(workload: dict[str, Any]) -> tuple[list[Running], list[Waiting]]:
    """Return the running and the waiting requests of one step.

    With ``first`` 0, request 0 is a waiting one, or, with ``late``, a running one.
    """
    first, queue, turned = workload.get("first", 1), workload["waiting"], workload.get("turned", 0)
    begun = workload["begun"] if isinstance(workload["begun"], list) else [workload["begun"]] * bool(workload["begun"])
    if 0 in begun:
        raise Invalid
    ahead = (
        len(queue) if first == 0 and not workload.get("late") else 0
    )  # the number of waiting requests that are older than the running ones
    numbers = [first + ahead + i for i in range(len(workload["answers"]) + len(begun))]
    running = [Running(uid, 0, need, 0, uid) for uid, need in zip(numbers, workload["answers"], strict=False)]
    running += [Running(uid, left, 0, 0, uid) for uid, left in zip(numbers[len(running) :], begun, strict=True)]
    if workload.get("mixed", 0) < 0:
        answering = running[: len(workload["answers"])]
        pairs = zip_longest(running[len(answering) :], answering)
        running = [r for pair in pairs for r in pair if r is not None]
    elif workload.get("mixed"):
        random.Random(workload["mixed"]).shuffle(running)
    skipped = workload.get("skipped", 0)
    running = [
        r._replace(admission_order=i, skipped_steps=skipped * (i % 2), arrival=r.uid) for i, r in enumerate(running)
    ]
    start = 0 if ahead else first + len(running)
    waiting: list[Waiting] = []
    uids = [start + (len(queue) - 1 - place if turned else place) for place in range(len(queue))]
    for place, (cached, left, *same) in enumerate(queue):
        if same and same[0] >= place:
            raise Invalid
        other = uids[same[0]] if same and same[0] >= 0 else None
        if same and same[0] < -1:
            other = numbers[0] if same[0] == -2 and numbers else first + 10**6
        waiting.append(Waiting(uids[place], start + place, cached + left, cached, other, 7_000 * place * turned))
    waited = workload.get("waited", [])
    waiting = [*(w._replace(skipped_steps=n) for w, n in zip(waiting, waited, strict=False)), *waiting[len(waited) :]]
    return _with_priorities(running, workload), _with_priorities(waiting, workload)


def _with_priorities(requests: Sequence[Any], workload: dict[str, Any]) -> list[Any]:
    """Return the requests with the priorities of ``urgent``."""
    urgent = workload.get("urgent", 0)
    if urgent < 2:
        return [request._replace(priority=-urgent * place) for place, request in enumerate(requests)]
    rng = random.Random(urgent)
    return [request._replace(priority=rng.randint(-2, 3)) for request in requests]


def run_step(judge: Judge, workload: dict[str, Any]) -> None:
    """Check the plan for one step. Raise `Invalid` if the step is meaningless."""
    if workload["chunk"] < 1 or any(len(sizes) not in (2, 3) or sizes[1] < 1 for sizes in workload["waiting"]):
        raise Invalid
    running, waiting = requests_of(workload)
    left = {w.uid: w.num_tokens - w.num_cached_tokens for w in waiting}

    def cost(uid: int) -> AdmissionCost:
        return _admission_cost(workload, left[uid])

    # The scheduler's own rows have used the share of prompts already, so decode rows may use all tokens that are left.
    more = workload.get("prefill", 0), workload.get("reserved", 0)
    free = StepBudget(workload["chunk"], workload["slots"], workload["pages"], more[1], cost, more[0])
    judge.plan(waiting, running, free)


def show_plan(workload: dict[str, Any]) -> str:
    """Describe the workload, or the one step."""
    order = "scheduler.order=lpm, " if workload["order"] == "lpm" else ""
    if "queue" in workload:
        numbers = f"the first {workload['fits']} get pages, requests that can be admitted: {workload['slots']}"
        return f"{order}{amount(workload['queue'], 'waiting request')}, {numbers}"
    if "answers" not in workload:
        return order + show(workload)
    free = f"free pages: {workload['pages']}, requests that can be admitted: {workload['slots']}"
    kept = workload.get("reserved", 0)
    free += f", pages kept for running requests: {kept}" if kept else ""
    growth = workload.get("growth", 0)
    free += f", pages that an admitted request reserves for later: {growth}" if growth else ""
    lines = [f"{order}one step of {amount(workload['chunk'], 'token')}, {free}"]
    running, waiting = requests_of(workload)
    for r in running:
        what = f"runs, {amount(r.num_remaining_tokens, 'prompt token')} to compute"
        needs = f"decodes, needs {_new_pages(r.num_new_pages)}"
        lines.append(f"request {r.uid}{_priority(r)}: {what if r.num_remaining_tokens else needs}")
    for w in waiting:
        same = "" if w.same_prefix_req is None else f", same_prefix_req={w.same_prefix_req}"
        cached = amount(w.num_cached_tokens, "prompt token")
        needs = _new_pages(_admission_cost(workload, _uncached(w)).pages)
        same += f", left out of {amount(w.skipped_steps, 'step')}" if w.skipped_steps else ""
        says = f"waits, {cached} cached, {_uncached(w)} to compute, needs {needs}{same}"
        lines.append(f"request {w.uid}{_priority(w)}: {says}")
    return "\n".join(lines)


def _priority(request: Running | Waiting) -> str:
    return f", priority {request.priority}" if request.priority else ""


def _new_pages(number: int) -> str:
    return amount(number, "new page") if number else "no new page"


def _admission_cost(workload: dict[str, Any], uncached: int) -> AdmissionCost:
    """Return the pages that a waiting request of one step needs at its admission, and later."""
    return AdmissionCost(-(-uncached // 16) if workload.get("priced") else 0, workload.get("growth", 0))


def make_long(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a workload in which a prompt of many chunks arrives while requests decode, and another prompt after it."""
    chunk = rng.choice([4, 6, 8, 16])
    jobs = [{"id": i + 1, "stem": 0, "shared": 0, "own": rng.randint(1, 4), "answer": rng.randint(8, 30),
             "arrive": i % 3} for i in range(1 + min(size, 4))]  # fmt: skip
    jobs.append(
        {"id": 8, "stem": 0, "shared": 0, "own": chunk * rng.randint(2, 8), "answer": 2, "arrive": rng.randint(3, 6)}
    )
    jobs.append({"id": 9, "stem": 0, "shared": 0, "own": rng.randint(1, 3 * chunk), "answer": 4, "arrive": 7})
    return {"page_size": 4, "pages": 200, "slots": 8, "chunk": chunk, "jobs": jobs, "order": "fcfs", "cache": "naive"}


def run_gap(student: Student, workload: dict[str, Any]) -> None:
    """Check the worst gap, with enough pages for all requests: each decodes in every step, and a step is one chunk."""
    policy = student.make(student.config(order="fcfs"))
    running = len(workload["jobs"])
    if workload["chunk"] <= running or workload["slots"] < running or workload["pages"] < 200:
        raise Invalid
    gaps, chunk = Gaps(), workload["chunk"]
    simulate(workload, shipped_cache("naive", workload["page_size"]), policy, overlap=False, observers=gaps.relay)
    if gaps.worst > chunk:
        promise = f"Between two tokens of an answer, the engine computes at most {chunk} tokens (max_prefill_tokens)."
        raise Broken("decodes-late", promise, f"{gaps.worst} tokens were computed, with enough pages for all requests.")


def count_gap(student: Student) -> str:
    """Measure the worst gap in tokens when a prompt of 1,200 tokens arrives while fifteen requests decode."""
    workload = late_prompt(student.random)
    chunk = workload["chunk"]
    gaps = {}
    for name, policy in (("prefill_first", make_plugin("scheduler", "prefill_first")), ("yours", student.make())):
        meter = Gaps()
        simulate(workload, shipped_cache("naive", 16), policy, overlap=False, observers=meter.relay)
        gaps[name] = meter.worst
    if gaps["yours"] > chunk:
        promise = f"The worst gap is one chunk: {chunk} tokens."
        seen = f"The worst gap is {gaps['yours']} tokens."
        raise Broken("decodes-late", promise, seen, workload=workload, show=show(workload))
    return f"worst gap {gaps['yours']} tokens; {gaps['prefill_first']} with prefill_first"


def count_prefill(student: Student) -> str:
    """Count the prompt tokens computed for twelve requests about two handbooks that arrive together.

    A request that waits one step for another request with the same handbook finds the handbook cached.
    """
    rng = student.random
    jobs = [{"id": i + 1, "stem": i % 2, "shared": 256, "own": rng.randint(4, 20), "answer": 6, "arrive": i // 8}
            for i in range(12)]  # fmt: skip
    workload = {"page_size": 16, "pages": 400, "slots": 16, "chunk": 128, "jobs": jobs}
    least = least_prefill(jobs_of(workload), 16)
    prefilled = simulate(workload, shipped_cache("radix", 16), student.make(), causes=cause_of).counts.prompt_tokens
    if prefilled > 1.02 * least:
        promise = f"The engine prefills at most 1.02 times the least possible in whole pages, {least}."
        seen = f"{prefilled} tokens were prefilled."
        raise Broken("same-prefix", promise, seen, workload=workload, show=show(workload))
    return f"prefilled {prefilled} tokens, least possible in whole pages {least}"


def count(student: Student) -> str:
    """Run both counts."""
    return f"{count_gap(student)}; {count_prefill(student)}"


def policy_kit() -> type:
    """Import and return the conformance kit of scheduling policies."""
    from minisgl.testing.policy import PolicyConformance

    return PolicyConformance


def cause_of(text: str) -> str | None:
    """Return the lab's cause for a message of the conformance kit or of the scheduler."""
    if "asked twice" in text:
        return "impure"
    if "empty plans" in text or "stuck" in text:
        return "empty"
    return "ignores-grant" if "the plan" in text else None


GATES = (
    Gate(
        "plan",
        "each step has the right rows",
        search(make, run_plan, tries=CORNERS + 80, seconds=2.0, at_least=CORNERS + 40, show=show_plan),
        part="policy.plan",
    ),
    conformance(policy_kit, lambda student: student.make(), causes=cause_of, runs=12),
    Gate(
        "promises",
        "no answer waits for another request's prompt",
        search(make_long, run_gap, tries=20, seconds=0.8, show=show),
    ),
    Gate("counts", "the worst gap is one chunk, and no common prefix is computed twice", count),
    greedy(["scheduler=prefill_first"], ["max_prefill_tokens=32"]),
    facts(["plan"]),
)


def late_prompt(rng: random.Random) -> dict[str, Any]:
    """Return the workload of the count of gaps: a prompt of 1,200 tokens arrives while fifteen requests decode."""
    jobs = [{"id": i + 1, "stem": 0, "shared": 0, "own": rng.randint(4, 40), "answer": rng.randint(40, 80), "arrive": i}
            for i in range(15)]  # fmt: skip
    jobs.append({"id": 99, "stem": 0, "shared": 0, "own": 1200, "answer": 8, "arrive": 20})
    return {"page_size": 16, "pages": 400, "slots": 16, "chunk": 128, "jobs": jobs}


MOST_GAP, MORE_STEPS = 40, 3
"""The number to beat. Chunks of a constant size miss it; a constant number of tokens in a step reaches it."""
OPTION, OWN = "pacing", "own"
"""The option with which the number to beat is measured, if the student's policy has it."""


def measure_stretch(student: Student) -> tuple[str, bool]:
    """Compare the worst gap and the steps of the student's policy with those of `mixed` on `late_prompt`.

    The policy has the option ``pacing=own`` if it has an option of this name. The gates never set the option, because
    they demand that the policy asks for all tokens of a prompt.
    """
    options = {OPTION: OWN} if OPTION in student.options() else {}
    counted = []
    for policy in (student.make(student.config(**options)), make_plugin("scheduler", "mixed")):
        gaps = Gaps()
        run = simulate(late_prompt(student.random), shipped_cache("naive", 16), policy, overlap=False,
                       observers=gaps.relay)  # fmt: skip
        counted.append((gaps.worst, run.counts.steps))
    (gap, steps), (most_gap, most_steps) = counted
    text = f"worst gap {gap} tokens in {steps} steps; `mixed` has {most_gap} in {most_steps}"
    return text, gap <= MOST_GAP and steps <= most_steps + MORE_STEPS


STRETCH = Stretch(
    "A prompt of 1,200 tokens arrives while fifteen requests decode. The policy `mixed` has a worst gap of 128 tokens. "
    f"Reach a gap of at most {MOST_GAP} tokens with at most {MORE_STEPS} steps more than `mixed`, with a way to divide "
    f"prompts that an option `{OPTION}={OWN}` of your policy selects. The other requests are new in each run.",
    measure_stretch,
)
