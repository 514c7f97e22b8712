"""Gates of lab `slo`: each plan is compared with the rules, and timed runs with the limits of both classes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from minisgl.bench.loadgen.metrics import itls
from minisgl.chapters.lab.grader.class_rules import UNLIMITED, Judge, Request, urgency, wanted
from minisgl.chapters.lab.grader.conformance import conformance, greedy
from minisgl.chapters.lab.grader.gate import Broken, Gate, Invalid, Stretch, Student, amount
from minisgl.chapters.lab.grader.search import search
from minisgl.chapters.lab.grader.server_gate import facts
from minisgl.chapters.lab.grader.simulated_workloads import shipped_cache, show, simulate, translate
from minisgl.chapters.lab.grader.timed_runs import TimedJob, TimedRun, serve
from minisgl.scheduler import PolicyError, Running, Waiting
from minisgl.scheduler.cache_manager import AdmissionCost
from minisgl.scheduler.planner import StepBudget, WaitingView
from minisgl.testing.drive import make_plugin

MAX_GAP = 0.050
"""Seconds between two tokens of an interactive request, in the runs of the gate `limits`."""
LARGE_STEP = 1.0
"""Seconds that an interactive request may lose to a large step that began before it arrived, and to retractions."""


# ---- the parts alone -------------------------------------------------------------------------------------


def build(student: Student, workload: dict[str, Any]) -> Any:
    """Return the student's policy with the options ``interactive``, ``step`` and ``share`` (percent)."""
    step, share = workload["step"], workload["share"]
    if step < 1 or not 0 <= share <= 100:
        raise Invalid
    try:
        config = student.config(interactive=workload["interactive"], step_tokens=step, batch_share=share / 100)
    except TypeError as error:
        promise = "The options are `interactive`, `step_tokens` and `batch_share`."
        raise Broken("options", promise, f"{error}.") from error
    policy = student.make(config)
    if not getattr(policy, "uses_priority", False):
        raise Broken("options", "The policy has `uses_priority = True`.", "It has not: requests keep no priority.")
    return policy


def options_of(rng: random.Random) -> dict[str, Any]:
    """Return random options; the share is in percent, and may be a part of a percent."""
    step = rng.choice([rng.randint(1, 64), rng.randint(65, 1024), 512])
    share = rng.choice([0, 10, 25, 25, 50, 100, 100 / 8, 100 / 256])
    return {"interactive": rng.choice([0, 0, -1, 2]), "step": step, "share": share}


def make_limit(rng: random.Random, size: int) -> dict[str, Any]:
    """Return random arguments of `prompt_tokens`: also 256 decode rows, and budgets and steps of 100,000 tokens."""
    left = rng.choice([rng.randint(1, 200), 8192, rng.randint(1, 8192), 100_000])
    decode = rng.choice([0, rng.randint(0, 300), 256, rng.randint(0, 8)])
    options = options_of(rng)
    if rng.random() < 0.1:
        options["step"] = rng.randint(1_000, 100_000)
    return {**options, "open": rng.random() < 0.7, "decode": decode, "left": left}


def show_limit(workload: dict[str, Any]) -> str:
    """Describe the arguments."""
    state = "an interactive request is open" if workload["open"] else "no interactive request is open"
    rows, left = amount(workload["decode"], "decode row"), amount(workload["left"], "token")
    return f"step_tokens={workload['step']}, {rows}, {left} left; {state}"


def run_limit(student: Student, workload: dict[str, Any]) -> None:
    """Grade `prompt_tokens` alone. A policy without this method is graded by its plans."""
    policy = build(student, workload)
    if workload["left"] < 1:
        raise Invalid
    decode, left, step = workload["decode"], workload["left"], workload["step"]
    if not hasattr(policy, "prompt_tokens"):
        return
    budget = StepBudget(left, 8, 100, 0, lambda uid: AdmissionCost(0, 0), 0)
    got = policy.prompt_tokens(bool(workload["open"]), decode, budget)
    right = min(max(step - decode, -(-step // 4)), left) if workload["open"] else left
    if got == right:
        return
    promise = "`prompt_tokens` returns how many prompt tokens the step may compute beside its decode rows."
    cause = "limit" if got > right else "small"
    if workload["open"] and got == min(max(step, -(-step // 4)), left):
        cause = "decodes"
    elif workload["open"] and step - decode < -(-step // 4) and got < right:
        cause = "quarter"
    raise Broken(cause, promise, f"It returned {got}; expected {right}.")


def make_share(rng: random.Random, size: int) -> dict[str, Any]:
    """Return random arguments of `kept_tokens`."""
    prompts = [[rng.choice(["begun", "waits"]), rng.randint(1, 300), rng.randint(0, 3) * 16]
               for _ in range(rng.randint(0, size))]  # fmt: skip
    if size in (1, 2):  # the share is not a whole number of percent
        share = rng.choice([100 / 8, 300 / 16, 100 / 64]) if size == 1 else 100 / 256
        prompts = [["begun", 3_000, 0], ["waits", 3_000, 16]]
        return {**options_of(rng), "share": share, "tokens": rng.choice([1_000, 6_000, 8_192]), "prompts": prompts}
    if size == 3:  # the share is rounded down
        tokens = 4 * rng.randint(2, 2_000) + 3
        return {**options_of(rng), "share": 25, "tokens": tokens, "prompts": [["waits", 9_000, 0], ["begun", 9, 0]]}
    if size % 8 == 7:  # many prompts
        prompts = [["waits", rng.randint(1, 3), 0] for _ in range(rng.randint(100, 400))]
    return {**options_of(rng), "tokens": rng.choice([rng.randint(1, 9), rng.randint(1, 600), 8192]), "prompts": prompts}


def show_share(workload: dict[str, Any]) -> str:
    """Describe the arguments."""
    tokens = amount(workload["tokens"], "prompt token")
    lines = [f"batch_share={workload['share'] / 100}, {tokens} in the step"]
    for kind, want, cached in workload["prompts"]:
        words = f"waits, {amount(cached, 'token')} cached," if kind == "waits" else "runs,"
        lines.append(f"a batch request {words} {amount(want, 'prompt token')} to compute")
    return "\n".join(lines)


def run_share(student: Student, workload: dict[str, Any]) -> None:
    """Grade `kept_tokens` alone. A policy without this method is graded by its plans."""
    policy = build(student, workload)
    if workload["tokens"] < 1 or any(want < 1 for _, want, _ in workload["prompts"]):
        raise Invalid
    if not hasattr(policy, "kept_tokens"):
        return
    batch: list[Request] = []
    for uid, (kind, want, cached) in enumerate(workload["prompts"], 1):
        if kind == "waits":
            batch.append(Waiting(uid, uid, want + cached, cached, None, 0, 9))
        else:
            batch.append(Running(uid, want, 0, 0, uid, 9, uid))
    total = sum(map(wanted, batch))
    exact = workload["share"] / 100 * workload["tokens"]
    got, right = policy.kept_tokens(workload["tokens"], batch), min(int(exact), total)
    error = right not in (0, total) and abs(exact - round(exact)) < 1e-6  # of a float: 0.1 * 30 is not quite 3
    if not isinstance(got, int) or abs(got - right) > error:
        cause = "share" if not isinstance(got, int) or got < right else "urgent"
        promise = "`kept_tokens` is `batch_share` of the tokens, rounded down, and at most what the prompts want."
        raise Broken(cause, promise, f"It returned {got!r}; expected {right}: the prompts want {total}.")


def judge_of(student: Student, workload: dict[str, Any]) -> Judge:
    """Return the judge of the student's policy with the options of a workload."""
    other = {"interactive": workload["interactive"] + 1, "step": workload["step"] + 7, "share": 100 - workload["share"]}
    return Judge(lambda: build(student, workload), workload, lambda: build(student, other))


# ---- one step ----------------------------------------------------------------------------------------------


def make_step(rng: random.Random, size: int) -> dict[str, Any]:
    """Return one step with room for all: also 256 decode rows and budgets of 8,192 tokens."""
    workload = {**options_of(rng), "chunk": rng.choice([64, 512, 8192, 8192, rng.randint(1, 700)]), "pages": 100_000}
    most = rng.choice([30, 300, 3000])
    mine = rng.choice([[0, 1], [0, 1], [0], [1, 2], [-3, 0, 1, 5]])
    entries: list[list[Any]] = [["decode", rng.choice(mine), rng.randint(0, 1), 0] for _ in range(rng.randint(0, size))]
    if size % 6 == 5:
        entries += [["decode", rng.choice(mine), rng.randint(0, 1), 0] for _ in range(256)]
    entries += [["begun", rng.choice(mine), rng.randint(1, most), 0] for _ in range(rng.randint(0, 1 + size // 3))]
    entries += [["waits", rng.choice(mine), rng.randint(1, most), rng.choice([0, 0, 16, 320])]
                for _ in range(rng.randint(0, 1 + size // 2))]  # fmt: skip
    if size % 6 == 4:  # decode rows that find no page
        workload["pages"] = rng.randint(0, 2)
    if size % 12 == 8:  # many waiting requests
        workload["chunk"] = 8192
        entries += [["waits", rng.choice(mine), rng.randint(1, 3), 0] for _ in range(rng.randint(100, 250))]
    if size % 3 == 0:
        entries.append(["same", rng.choice(mine), rng.randint(1, most), 0])
    if size % 9 == 6:  # only a request that is left out for its prefix is interactive
        workload["interactive"] = min(mine) - 1
        entries += [["same", min(mine) - 1, rng.randint(1, most), 0], ["begun", max(mine), rng.randint(1, 9_000), 0]]
    if size % 9 == 1:  # the batch prompts that wait are left out for their prefix, and interactive ones want all tokens
        entries = [["same", *e[1:]] if e[0] == "waits" and e[1] > workload["interactive"] else e for e in entries]
        entries += [["same", workload["interactive"] + 1, rng.randint(1_000, 9_000), 0]]
        entries += [["waits", workload["interactive"], rng.randint(1_000, 9_000), 0]]
    rng.shuffle(entries)
    if size == 7:  # the only interactive request finds no page for its next token
        entries = [["decode", 0, 1, 0], ["begun", 1, rng.randint(1_000, 9_000), 0]]
        workload |= {"interactive": 0, "chunk": 8192, "pages": 0}
    return {**workload, "rows": 1_000, "entries": entries}


def show_step(workload: dict[str, Any]) -> str:
    """Describe the step in a line for each request."""
    lines = [
        f"interactive={workload['interactive']} step_tokens={workload['step']} batch_share={workload['share'] / 100}; "
        f"one step of {amount(workload['chunk'], 'token')}, {amount(workload['pages'], 'free page')}, "
        f"{amount(workload['rows'], 'free row')}; "
        "the requests in order of arrival:"
    ]
    says = {
        "begun": "runs, {} to compute",
        "waits": "waits, {} to compute, {} cached",
        "same": "waits, {} to compute, with the same next page as another request",
    }
    for uid, _, (kind, priority, a, b) in _numbered(workload):
        state = says[kind].format(amount(a, "prompt token"), b) if kind in says else f"decodes, {amount(a, 'new page')}"
        lines.append(f"request {uid}, priority {priority}: {state}")
    return "\n".join(lines)


def _numbered(workload: dict[str, Any]) -> Iterator[tuple[int, int, list[Any]]]:
    """Yield the uid, the arrival and the entry of each request: later requests have lower uids."""
    entries = workload["entries"]
    for arrival, entry in enumerate(entries, 1):
        yield len(entries) - arrival, arrival, entry


def views_of(workload: dict[str, Any]) -> tuple[list[Waiting], list[Running]]:
    """Return the views of a step's requests, which arrived in their order in the workload.

    Every third request was left out of 1,000 steps, which changes nothing.
    """
    waiting, running = [], []
    for uid, arrival, (kind, priority, a, b) in _numbered(workload):
        order, skipped = arrival * 7919 % 1009, 1_000 * (arrival % 3 == 2)
        if kind == "decode":
            running.append(Running(uid, 0, min(a, 1), skipped, order, priority, arrival))
        elif a < 1:
            raise Invalid
        elif kind == "begun":
            running.append(Running(uid, a, 0, skipped, order, priority, arrival))
        else:
            same = UNLIMITED if kind == "same" else None
            waiting.append(Waiting(uid, arrival, a + b, b, same, skipped, priority))
    # In order of admission: a request that was retracted runs again behind later ones.
    return sorted(waiting, key=urgency), sorted(running, key=lambda r: r.admission_order)


def run_step(student: Student, workload: dict[str, Any]) -> None:
    """Check the plan for one step, and the same policy's plan for a later step, with less left of the prompts."""
    if workload["chunk"] < 1 or workload["pages"] < 0:
        raise Invalid
    judge = judge_of(student, workload)
    plan_step(judge, workload)
    later = [[kind, priority, max(a // 9, min(a, 1)) if kind == "begun" else a, b]
             for kind, priority, a, b in workload["entries"]]  # fmt: skip
    plan_step(judge, {**workload, "entries": later})


def plan_step(judge: Judge, workload: dict[str, Any]) -> None:
    """Check the plan for one step."""
    waiting, running = views_of(workload)
    if workload["pages"] < 100:
        waiting = []  # the last pages are for decode rows
    budget = StepBudget(
        workload["chunk"],
        min(workload["rows"], max(len(waiting), 1)),
        workload["pages"],
        0,
        lambda uid: AdmissionCost(1, 0),
        None,
        lambda _: [],
    )
    judge.plan(waiting, running, budget)


# ---- runs on the simulated engine ---------------------------------------------------------------------------


def make_full(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a workload in which batch requests fill the rows or the pages before interactive ones arrive."""
    if size == 21:
        return make_many(rng)
    if size == 23:  # a batch prompt that stays has more tokens than the step
        entries = [["begun", 1, 900, 0], ["decode", 1, 0, 0], ["waits", 0, rng.randint(20, 40), 0]]
        options = {"interactive": 0, "step": 64, "share": 25}
        return {**options, "chunk": 8192, "rows": 0, "pages": 100, "entries": entries}
    if size == 25:  # an interactive request needs the pages of two batch requests
        entries = [["decode", 1, 0, 0]] * 3 + [["waits", 0, 160, 0]]
        return {"interactive": 0, "step": 512, "share": 25, "chunk": 8192, "rows": 8, "pages": 1, "entries": entries}
    if size % 2 == 0:
        return make_tight(rng, size)
    by_rows = rng.random() < 0.5
    slots, pages = (rng.randint(1, 4), 200) if by_rows else (8, rng.randint(12, 30))
    room, jobs = pages * 4, []

    def add(first: int, count: int, own: tuple[int, int], arrive: tuple[int, int], priorities: list[int]) -> None:
        for i in range(count):
            length = rng.randint(*own) if by_rows or rng.random() < 0.7 else rng.randint(1, 6)
            jobs.append({"id": first + i, "stem": 0, "shared": 0, "own": length, "answer": rng.randint(3, 16),
                         "arrive": rng.randint(*arrive), "priority": rng.choice(priorities)})  # fmt: skip

    most = min(size, 4)
    add(
        1,
        rng.randint(1, most) + (slots if by_rows else 2),
        (1, 30) if by_rows else (room // 6, room // 2),
        (0, rng.choice([2, 10])),
        [1, 1, 4],
    )
    add(50, rng.randint(1, 1 + most), (1, 40) if by_rows else (1, room // 3), (3, 10), [0, 0, -2])
    return {"interactive": 0, "step": rng.choice([16, 64, 512]), "share": 25, "page_size": 4, "pages": pages,
            "slots": slots, "chunk": rng.choice([32, 512]), "jobs": jobs}  # fmt: skip


def make_tight(rng: random.Random, size: int) -> dict[str, Any]:
    """Return one step in which interactive requests find too few pages or rows, and batch requests wait too."""
    mine = rng.choice([[0, 1], [0, 1], [0, 1, 1, 5], [-2, 0, 1]])
    entries: list[list[Any]] = [["decode", rng.choice(mine), 0, 0] for _ in range(rng.randint(0, 1 + size // 2))]
    entries += [["begun", rng.choice(mine), rng.randint(1, 300), 0] for _ in range(rng.randint(0, 3))]
    entries += [["waits", rng.choice(mine[:2]), rng.randint(1, 400), 0] for _ in range(rng.randint(1, 4))]
    entries += [["waits", max(mine), rng.randint(1, 60), 0] for _ in range(rng.randint(0, 3))]
    entries += [["same", rng.choice(mine), rng.randint(1, 60), 0]] * (rng.random() < 0.2)
    rng.shuffle(entries)
    rows, pages = rng.choice([(0, 100), (rng.randint(0, 2), 100), (8, rng.randint(1, 20)), (2, 20)])
    draw = rng.random()
    if draw < 0.4:  # an interactive request needs more pages than there are, batch requests wait too, and none runs
        entries = [[kind, p if kind in ("waits", "same") else 0, *more] for kind, p, *more in entries]
        entries += [["waits", 0, rng.randint(330, 400), 0], ["waits", max(mine), rng.randint(1, 60), 0]]
        rows, pages = 8, rng.randint(4, 20)
    elif draw < 0.6:  # no free row, and only batch requests wait
        entries = [[kind, max(mine) if kind == "waits" else p, *more] for kind, p, *more in entries if kind != "same"]
        entries, rows, pages = [*entries, ["begun", 0, rng.randint(100, 600), 0]], 0, 100
    elif draw < 0.8:  # batch prompts run that are not retracted, because they need not be, or because it is not enough
        entries = [["begun", max(mine), rng.randint(1, 300), 0] for _ in range(rng.randint(2, 4))]
        entries += [["waits", 0, rng.choice([rng.randint(1, 60), 2_000]), 0] for _ in range(rng.randint(1, 2))]
        rows, pages = rng.choice([(0, 200), (0, 100), (8, 2)])
        rng.shuffle(entries)
    more = {"interactive": 0, "chunk": rng.choice([8192, 8192, 64]), "rows": rows, "pages": pages}
    return {**options_of(rng), **more, "entries": entries}


def make_many(rng: random.Random) -> dict[str, Any]:
    """Return one step with many free rows, one interactive prompt more than rows, and too few pages for this prompt."""
    rows = rng.randint(33, 80)
    entries: list[list[Any]] = [["decode", 1, 0, 0]] * 30 + [["waits", 0, 1, 0]] * rows
    entries.append(["waits", 0, 16 * (rows + 4), 0])
    more = {"interactive": 0, "chunk": 8192, "rows": rows, "pages": rows + 2, "entries": entries}
    return {**options_of(rng), **more, "step": 512}


def run_tight(student: Student, workload: dict[str, Any]) -> None:
    """Check the plan for one step with few pages or rows. A running request has a row and some pages."""
    if workload["chunk"] < 1 or workload["pages"] < 1:
        raise Invalid
    waiting, running = views_of(workload)
    pages = {w.uid: -(-w.num_tokens // 16) for w in waiting}

    def retractions(order: Sequence[int]) -> list[int]:
        rows, free, victims = workload["rows"], workload["pages"], list[int]()
        for i, uid in enumerate(order):
            if uid not in pages:
                continue
            behind = [other for other in order[i:] if other not in pages and other not in victims]
            freed: list[int] = []
            while rows + len(freed) < 1 or free + sum(_owned(v) for v in freed) < pages[uid]:
                if not behind:
                    return victims
                freed.append(behind.pop())
            rows, free = rows + len(freed) - 1, free + sum(_owned(v) for v in freed) - pages[uid]
            victims += freed
        return victims

    cost = {uid: AdmissionCost(count, 0) for uid, count in pages.items()}
    budget = StepBudget(workload["chunk"], workload["rows"], workload["pages"], 0, cost.__getitem__, None, retractions)
    judge_of(student, workload).plan(waiting, running, budget)


def _owned(uid: int) -> int:
    """Return how many pages a running request of one step owns."""
    return 2 + uid * 5 % 11


def show_full(workload: dict[str, Any]) -> str:
    """Describe the workload, or the one step."""
    if "entries" in workload:
        return show_step(workload)
    return f"step_tokens={workload['step']} batch_share={workload['share'] / 100}; " + show(_from_step_0(workload))


def _from_step_0(workload: dict[str, Any]) -> dict[str, Any]:
    """Return the workload with its first arrival at step 0: a finding counts the steps from the first plan on."""
    first = min((job["arrive"] for job in workload["jobs"]), default=0)
    return {**workload, "jobs": [{**job, "arrive": job["arrive"] - first} for job in workload["jobs"]]}


def run_full(student: Student, workload: dict[str, Any]) -> None:
    """Check every plan of a run in which interactive requests need the room of batch requests.

    The starvation guard of the scheduler is off.
    """
    if "entries" in workload:
        return run_tight(student, workload)
    judge, workload = judge_of(student, workload), _from_step_0(workload)
    simulate(workload, shipped_cache("naive", workload["page_size"]), judge, causes=cause_of, overlap=False,
             starvation_steps=UNLIMITED)  # fmt: skip


# ---- the limits of both classes ------------------------------------------------------------------------------

KINDS = ("steady", "burst", "flood", "quiet", "rows")


def make_load(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a load of both classes, whose kind depends on ``size``: times are in milliseconds.

    A burst: many interactive requests at once. A flood: more interactive prompts than the machine computes, for some
    seconds. Quiet: batch requests alone. Rows: batch requests fill all rows.
    """
    kind, grown = KINDS[(size - 1) % len(KINDS)], 1 + (size - 1) // len(KINDS)
    rows = 256
    jobs: list[dict[str, int]] = []

    def add(
        count: int, priority: int, at: Callable[[], float], prompt: tuple[int, int], answer: tuple[int, int]
    ) -> None:
        for _ in range(count):
            jobs.append({"id": len(jobs) + 1, "at": round(at()), "prompt": rng.randint(*prompt),
                         "answer": rng.randint(*answer), "priority": priority})  # fmt: skip

    talk = (100, 700), (5, 40)
    if kind == "flood":
        add(2, 1, lambda: rng.uniform(150, 300), (500, 1000), (2, 6))
        add(100 + 40 * grown, 0, lambda: rng.uniform(0, 1700 + 700 * grown), (300, 500), (1, 3))
    elif kind == "quiet":
        add(4 + 8 * grown, 1, lambda: rng.uniform(0, 100), (1000, 4000), (2, 30))
    else:
        add(6 + 6 * grown, 1, lambda: rng.uniform(0, 300), (1500, 4000), (5, 60))
        if kind == "rows":
            rows = 8
            add(8, 1, lambda: 0, (50, 300), (200, 300))
        add(5 * grown, 0, lambda: rng.uniform(200, 500 + 500 * grown), *talk)
        if kind == "burst":
            start = rng.uniform(200, 900)
            add(10 + 10 * grown, 0, lambda: start, *talk)
    return {"interactive": 0, "step": 512, "share": 25, "kind": kind, "rows": rows, "jobs": jobs}


def show_load(workload: dict[str, Any]) -> str:
    """Describe the load in a line for each request."""
    lines = [f"load `{workload['kind']}`: at most {workload['rows']} running requests, max_prefill_tokens 8192"]
    for job in sorted(workload["jobs"], key=lambda job: (job["at"], job["id"])):
        name = "interactive" if job["priority"] <= 0 else "batch"
        lengths = f"{job['prompt']} prompt tokens, {job['answer']} output tokens"
        lines.append(f"request {job['id']}, {name}: arrives at {job['at'] / 1000:.2f} s, {lengths}")
    return "\n".join(lines)


def run_load(student: Student, workload: dict[str, Any]) -> None:
    """Compare what the clients of each class see with what they see where each class has a machine of its own."""
    jobs = [TimedJob(j["id"], j["at"] / 1000, j["prompt"], j["answer"], j["priority"]) for j in workload["jobs"]]
    if not jobs or len({job.uid for job in jobs}) < len(jobs) or workload["rows"] < 1:
        raise Invalid
    if any(job.at < 0 or job.prompt < 1 or job.answer < 1 for job in jobs):
        raise Invalid
    talk, batch = [job for job in jobs if job.priority <= 0], [job for job in jobs if job.priority > 0]
    run = timed(jobs, build(student, workload), workload["rows"])
    check_interactive(run, talk)
    check_batch(run, batch, bool(talk))


def timed(jobs: Sequence[TimedJob], policy: Any, rows: int = 256, chunk: int = 8192) -> TimedRun:
    """Serve the jobs without the scheduler's starvation guard."""
    try:
        return serve(jobs, policy, max_running_requests=rows, max_prefill_tokens=chunk, starvation_steps=UNLIMITED,
                     max_steps=4_000)  # fmt: skip
    except TimeoutError as error:
        promise = "Every request ends, without the help of the scheduler's starvation guard."
        raise Broken("starves", promise, f"{error}.") from error
    except (PolicyError, AssertionError) as error:
        raise translate(error, cause_of) from error


def alone(jobs: Sequence[TimedJob]) -> TimedRun:
    """Serve the jobs of one class in the order of arrival, in mixed steps of 512 tokens."""
    return timed(jobs, make_plugin("scheduler", "mixed"), chunk=512)


def check_interactive(run: TimedRun, jobs: Sequence[TimedJob]) -> None:
    """Check the time to first token and the gaps of interactive requests."""
    if not jobs:
        return
    for job in jobs:
        gaps = itls(run.records[job.uid])
        if max(gaps, default=0.0) > MAX_GAP:
            seen = f"A token of request {job.uid} came {max(gaps) * 1e3:.0f} ms after the one before."
            raise Broken("gap", f"Gaps of interactive requests are at most {MAX_GAP * 1e3:.0f} ms.", seen,
                         request=job.uid)  # fmt: skip
    own = alone(jobs)
    for job in jobs:
        ttft, base = run.records[job.uid].ttft, own.records[job.uid].ttft
        if ttft > 2 * base + LARGE_STEP:
            seen = f"Request {job.uid} waited {ttft:.2f} s for its first token; without batch requests, {base:.2f} s."
            promise = f"TTFT is at most twice that without batch requests, and {LARGE_STEP} s more."
            raise Broken("ttft", promise, seen, request=job.uid)


def check_batch(run: TimedRun, jobs: Sequence[TimedJob], has_interactive: bool) -> None:
    """Check when the batch requests are done."""
    if not jobs:
        return
    ids = [job.uid for job in jobs]
    done = max(run.records[uid].end for uid in ids)
    if has_interactive:
        base = alone(jobs).seconds
        if done > 4 * base + 1:
            seen = f"They were done after {done:.2f} s; alone, in steps of 512 tokens, after {base:.2f} s."
            promise = "Batch requests are done after four times the time that they need alone, and 1 s more."
            raise Broken("starves", promise, seen, request=max(ids, key=lambda uid: run.records[uid].end))
    else:
        base = timed(jobs, make_plugin("scheduler", "mixed")).seconds
        if done > 1.05 * base + 0.05:
            seen = f"They were done after {done:.2f} s; in steps of 8,192 tokens after {base:.2f} s."
            raise Broken("small", "Without interactive requests, batch requests have large steps.", seen)


# ---- a long queue --------------------------------------------------------------------------------------------

QUEUE, AHEAD = 20_000, 64
"""Waiting requests, and how many more than free rows a plan may read; the text says 32."""


def run_queue(student: Student) -> str:
    """Count how many waiting requests a plan reads, of a long queue, with few and with many free rows."""
    read = 0

    def entries(urgent: int) -> Iterator[Waiting]:
        nonlocal read
        for uid in range(1, QUEUE + 1):
            read += 1
            yield Waiting(uid, uid, 400, 0, None, 0, int(uid > urgent))

    most = 0
    running = [Running(QUEUE + i, 300 * (i % 2), 0, 0, i, i // 2, QUEUE + i) for i in range(1, 5)]
    policy = build(student, {"interactive": 0, "step": 512, "share": 25})
    for rows, urgent in product((0, 1, 8, 256), (0, 1, 300, QUEUE)):
        read = 0
        budget = StepBudget(8192, rows, 100_000, 0, lambda uid: AdmissionCost(25, 0), None, lambda _: [])
        policy.plan(WaitingView(QUEUE, entries(urgent)), running if rows == 8 else [], budget)
        most = max(most, read)
        if read > rows + AHEAD:
            seen = f"With {rows} free rows it read {read:,} of {QUEUE:,} waiting requests."
            raise Broken("scan", "A plan reads only the head of a long queue: an entry takes microseconds.", seen)
    return f"at most {most} of {QUEUE:,} waiting requests read in a step"


def policy_kit() -> type:
    """Import and return the conformance kit of scheduling policies."""
    from minisgl.testing.policy import PolicyConformance

    return PolicyConformance


def cause_of(text: str) -> str | None:
    """Return the lab's cause for a message of the conformance kit or of the scheduler."""
    if "asked twice" in text:
        return "impure"
    if "empty plans" in text or "stuck" in text or "expected all requests to finish" in text:
        return "starves"
    if "retract" in text:
        return "victims"
    return "ignores-grant" if "the plan" in text else None


GATES = (
    Gate(
        "limit",
        "`prompt_tokens` is the step's limit",
        search(make_limit, run_limit, seconds=0.5, at_least=60, show=show_limit),
        part="slo.limit",
    ),
    Gate(
        "share",
        "`kept_tokens` is the share of batch prompts",
        search(make_share, run_share, seconds=0.5, at_least=60, show=show_share),
        part="slo.share",
    ),
    Gate(
        "rows",
        "with room for all, each step has the right rows",
        search(make_step, run_step, tries=200, seconds=1.0, at_least=20, show=show_step),
        part="slo.rows",
        needs=("limit",),
    ),
    Gate(
        "room",
        "an interactive request gets the room of batch requests, and no more",
        search(make_full, run_full, tries=60, seconds=1.5, at_least=25, show=show_full),
        part="slo.room",
    ),
    Gate("queue", "a plan reads only the head of a long queue", run_queue),
    conformance(policy_kit, lambda student: student.make(), causes=cause_of, runs=8, limit=20.0),
    Gate(
        "limits",
        "both classes keep their limits under five kinds of load",
        search(make_load, run_load, tries=10, seconds=3.0, show=show_load),
        limit=20.0,
    ),
    greedy(["scheduler=prefill_first"], ["max_prefill_tokens=32"]),
    facts(["plan"]),
)


LATE, RATE, LOADS = 0.5, 60, 8
"""Seconds after which a first token is late, requests a second in the flood, and loads that are measured."""
MOST_LATE, TIMES = 0.41, "times the late answers of `slo`"
"""The number to beat. Larger steps and another share reach 0.8, short prompts first 0.45, with larger steps 0.39."""
FEWEST, LATEST = 0.95, 1.01
"""Documents' prompts in the floods, and the documents' end: as with `slo`, apart from what another load changes."""


def spread(rng: random.Random, low: int, high: int, count: int) -> list[int]:
    """Return ``count`` numbers from ``low`` to ``high`` in random order, one in each of as many equal parts."""
    width = (high + 1 - low) / count
    numbers = [low + int((i + rng.random()) * width) for i in range(count)]
    rng.shuffle(numbers)
    return numbers


def two_classes(rng: random.Random) -> tuple[list[TimedJob], list[TimedJob]]:
    """Return a load like that of the chapter, with a larger flood from 3 s to 5 s: interactive requests, documents."""
    times = sorted(rng.uniform(1.0, 7.0) for _ in range(60)) + sorted(rng.uniform(3.0, 5.0) for _ in range(2 * RATE))
    prompts = [*spread(rng, 100, 700, 60), *spread(rng, 100, 700, 2 * RATE)]
    pairs = enumerate(zip(times, prompts, strict=True))
    talk = [TimedJob(i, at, prompt, rng.randint(20, 120)) for i, (at, prompt) in pairs]
    docs = [TimedJob(1000 + i, 0.0, rng.randint(2000, 4000), rng.randint(50, 150), priority=1) for i in range(40)]
    return talk, docs


def outcome_of(load: tuple[list[TimedJob], list[TimedJob]], policy: Any) -> np.ndarray[Any, Any]:
    """Return the number of late first tokens, of documents' prompts that end in the flood, the end, and the gap."""
    talk, docs = load
    run = serve([*talk, *docs], policy)
    people, batch = [run.records[job.uid] for job in talk], [run.records[job.uid] for job in docs]
    gap = max(max(itls(r), default=0.0) for r in people)
    done = [0.0, *sorted(r.times[0] for r in batch)]
    begin, end = np.interp([3.0, 5.0], done, range(len(done)))  # a half computed prompt counts half
    return np.array([sum(r.ttft > LATE for r in people), end - begin, max(r.end for r in batch), gap])


def measure_stretch(student: Student) -> tuple[str, bool]:
    """Compare the student's policy with `slo` on loads that no file knows, with `sharing=own` if it has this option."""
    own = {"sharing": "own"} if "sharing" in student.options() else {}
    rng, mine, slo = student.random, [], []
    for _ in range(LOADS):
        load = two_classes(rng)
        mine.append(outcome_of(load, student.make(student.config(**own))))
        slo.append(outcome_of(load, make_plugin("scheduler", "slo")))
    late, flood, end, _ = np.sum(mine, 0)
    late_slo, flood_slo, end_slo, _ = np.sum(slo, 0)
    gap, times = max(each[3] for each in mine), round(late / late_slo, 2)
    flood, end, end_slo = round(flood, 2), round(end / LOADS, 2), end_slo / LOADS
    counted = (
        f"{times:.2f} {TIMES}, longest gap {1e3 * gap:.1f} ms, {flood:.2f} documents' prompts in the floods (`slo`: "
        f"{flood_slo:.2f}), documents done after {end:.2f} s (`slo`: {end_slo:.2f} s)"
    )
    failed = {
        f"{times:.2f} is more than {MOST_LATE:.2f}": times > MOST_LATE,
        f"the gap of {1e3 * gap:.2f} ms is longer than {1e3 * MAX_GAP:.0f} ms": gap > MAX_GAP,
        f"fewer documents' prompts than {FEWEST:g} times those of `slo`, {FEWEST * flood_slo:.2f}": (
            flood < round(FEWEST * flood_slo, 2)
        ),
        f"documents done after more than {LATEST:g} times as long as with `slo`, {LATEST * end_slo:.2f} s": (
            end > round(LATEST * end_slo, 2)
        ),
    }
    why = "; ".join(text for text, fails in failed.items() if fails)
    return f"{counted}; what fails: {why}" if why else counted, not why


STRETCH = Stretch(
    f"An answer is late if its first token takes more than {1e3 * LATE:.0f} ms. In floods of {RATE} requests a second, "
    f"the late answers of `slo` have the number 1.00. Reach {MOST_LATE:.2f}, with no gap above 50 ms, and with as many "
    "documents' prompts computed in the floods, and all documents done as early, as with `slo` (5 % fewer and 1 % "
    "later are allowed). A half computed prompt counts half. Your rules are those that an option `sharing=own` of your "
    "policy selects. The loads are new in each run.",
    measure_stretch,
)
