"""Lab `radix`: the student's cache lives beside a dictionary (`minisgl.testing.cache.CacheModel`), part by part; then
whole runs on the simulated engine. It asks the cache only what the scheduler may ask, so any structure will do.
What a life is, `minisgl.course.lab.grader.cache_histories` says.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from minisgl.course.lab.grader.cache_histories import Life, show_life
from minisgl.course.lab.grader.conformance import conformance, greedy
from minisgl.course.lab.grader.gate import Broken, Gate, Invalid, Student
from minisgl.course.lab.grader.search import search
from minisgl.course.lab.grader.server_gate import facts
from minisgl.course.lab.grader.simulated_workloads import (
    jobs_of,
    least_prefill,
    random_workload,
    shipped_cache,
    show,
    simulate,
)
from minisgl.testing.drive import make_plugin

Make = Callable[[random.Random, int], dict[str, Any]]
Live = Callable[[list[list[Any]]], None]
CATCH_ALL = ("counts", "split-links", "lock-path", "match-short")


def run_life(part: str, make: Make) -> Callable[[Student, dict[str, Any]], None]:
    known: dict[int, bool] = {}

    def small_pages_live(student: Student) -> bool:
        """Whether nothing goes wrong while a page is one token."""
        if id(student) not in known:
            made = [make(random.Random(seed), 1 + seed % 20) for seed in range(120)]
            lives = [life["events"] for life in made if life["page_size"] == 1]
            known[id(student)] = all(
                _lives(lambda events: Life(make_cache(student, 1), 1, part).live(events), life) for life in lives
            )
        return known[id(student)]

    def run(student: Student, workload: dict[str, Any]) -> None:
        size = workload["page_size"]
        if size < 1:
            raise Invalid

        def live(events: list[list[Any]]) -> None:
            Life(make_cache(student, size), size, part).live(events)

        old, new = [0] * size, [1] * size

        def writes() -> bool:
            """Whether the older of two prefixes no longer goes first when somebody has looked at it."""
            two: list[list[Any]] = [["insert", old], ["insert", new]]
            return _lives(live, [*two, ["evict", 1]]) and not _lives(live, [*two, ["match", old], ["evict", 1]])

        def flags() -> bool:
            """Whether one user may come and go, and of two not one."""
            one: list[list[Any]] = [["insert", old], ["lock", 0, old]]
            return _lives(live, [*one, ["unlock", 0]]) and not _lives(live, [*one, ["lock", 1, old], ["unlock", 0]])

        try:
            live(workload["events"])
        except Broken as broken:
            quiet = [event for event in workload["events"] if event[0] != "match"]
            if broken.cause == "evict-order" and (_lives(live, quiet) or writes()):
                broken.cause = "match-writes"  # all is well where nobody only looks
            if broken.cause == "lock-path" and _lives(live, _no_split(size)):
                broken.cause = "split-users"  # all is well where nothing is split
            elif broken.cause == "split-users" and not _lives(live, _no_split(size)):
                broken.cause = "lock-path"
            if broken.cause in ("lock-path", "counts") and flags():
                broken.cause = "users-flag"  # all is well while nobody else reads it
            if size > 1 and broken.cause in CATCH_ALL and small_pages_live(student):
                broken.cause = "page-size"
            raise

    return run


def _lives(live: Live, events: list[list[Any]]) -> bool:
    """Whether nothing goes wrong in this life."""
    try:
        live(events)
    except Exception:
        return False
    return True


def _no_split(size: int) -> list[list[Any]]:
    """A path of two edges, locked to its end: nothing has to be split."""
    first, both = [0] * size, [0] * size + [1] * size
    return [["insert", first], ["insert", both], ["lock", 0, both], ["lock", 1, first], ["unlock", 1], ["unlock", 0]]


def make_cache(student: Student, page_size: int) -> Any:
    """The student's cache. If its options still have the reference's ``compare``: without C++."""
    schema = student.plugin_manager.schema("cache", student.lab.name)
    options = {"compare": "numpy"} if "compare" in [f.name for f in fields(schema)] else {}
    return student.make(student.config(**options), page_size=page_size)


# ---- lives -----------------------------------------------------------------------------------------------


def _ids(rng: random.Random, most: int) -> list[int]:
    return [rng.randint(0, 1) for _ in range(rng.randint(0, most))]


def make_match(rng: random.Random, size: int) -> dict[str, Any]:
    """Prompts that part where an edge ends, so that nothing has to be split: each is new, or goes on from an older
    one's end. Then prompts that share any part of them."""
    page = rng.choice([1, 2, 3])
    stored: list[list[int]] = []
    events: list[list[Any]] = []
    for i in range(rng.randint(1, 1 + min(size, 5))):
        head = rng.choice([[], *stored])
        ids = [*head, *([10 + i] * page), *(rng.randint(0, 1) for _ in range(page * rng.randint(0, 3)))]
        stored.append(ids)
        events.append(["insert", ids])
        for _ in range(2):
            known, other = rng.choice(stored), rng.choice(stored)
            cut, on = rng.randint(0, len(known)), rng.randint(0, len(other)) // page * page
            events.append(["match", [*known[:cut], *_ids(rng, 2 * page)]])
            events.append(["match", [*known[: cut // page * page], *other[on:]]])
        events.append([rng.choice(["match", "elsewhere"]), rng.choice(stored)])
    return {"page_size": page, "events": events}


def make_split(rng: random.Random, size: int) -> dict[str, Any]:
    page = rng.choice([1, 2, 3])
    kinds = ["insert", "insert", "match"]
    return {"page_size": page, "events": [[rng.choice(kinds), _ids(rng, 4 * page)] for _ in range(2 + min(size, 12))]}


def make_lock(rng: random.Random, size: int, evict: bool = False) -> dict[str, Any]:
    page = rng.choice([1, 1, 2, 3])
    locked: list[int] = []
    events: list[list[Any]] = []
    for i in range(3 + min(size, 22)):
        kinds = ["insert", "insert", "lock", "match"] + ["unlock", "grow"] * bool(locked) + ["evict"] * evict
        kind = rng.choice(kinds)
        if kind == "lock":
            locked.append(i)
            events.append([kind, i, _ids(rng, 4 * page)])
        elif kind == "unlock":
            events.append([kind, locked.pop(rng.randrange(len(locked)))])
        elif kind == "grow":
            events.append([kind, rng.choice(locked), _ids(rng, 3 * page)])
        elif kind == "evict":
            events.append([kind, rng.randint(1, 5)])
        else:
            events.append([kind, _ids(rng, 4 * page)])
    return {"page_size": page, "events": events}


def make_evict(rng: random.Random, size: int) -> dict[str, Any]:
    return make_lock(rng, size, evict=True)


# ---- whole runs ---------------------------------------------------------------------------------------------


def make_run(rng: random.Random, size: int) -> dict[str, Any]:
    policy, order = rng.choice(
        [("mixed", "lpm"), ("mixed", "fcfs"), ("prefill_first", "fcfs"), ("decode_first", "lpm")]
    )
    return {**random_workload(rng, size), "policy": policy, "order": order, "overlap": rng.randint(0, 1)}


def run_run(student: Student, workload: dict[str, Any]) -> None:
    if workload["page_size"] < 1:
        raise Invalid
    policy = make_plugin("scheduler", workload["policy"], order=workload["order"])
    cache = make_cache(student, workload["page_size"])
    simulate(workload, cache, policy, overlap=bool(workload["overlap"]), causes=blame, thorough=True)


def blame(rule: str) -> str | None:
    """The lab's cause for a rule of the simulated engine, or for what the scheduler says."""
    if rule in ("kv-content", "page-shared", "page-given-back", "page-in-flight"):
        return "match-long" if rule == "kv-content" else "frees-before-remap"
    return "counts" if "pool" in rule or "ledger" in rule or "pages" in rule else None


def count_prefill(student: Student) -> str:
    """Three handbooks of 384 tokens, 42 questions, as in the course's stages. Each page of a handbook is computed
    once."""
    rng = student.random
    jobs = [{"id": i + 1, "stem": rng.randrange(3), "shared": 384 - 16 * rng.randrange(3), "own": rng.randint(8, 40),
             "answer": rng.randint(4, 40), "arrive": 2 * i} for i in range(42)]  # fmt: skip
    workload = {"page_size": 16, "pages": 512, "slots": 16, "chunk": 128, "jobs": jobs}
    least = least_prefill(jobs_of(workload), 16)
    prefilled = {}
    for name, cache in (("none", shipped_cache("naive", 16)), ("yours", make_cache(student, 16))):
        report = simulate(workload, cache, make_plugin("scheduler", "mixed", order="lpm"), causes=blame)
        prefilled[name] = report.counts.prompt_tokens
    if prefilled["yours"] > 1.02 * least:
        promise = f"At most 1.02 times the least possible is prefilled: {least} tokens."
        seen = f"{prefilled['yours']} were; {prefilled['none']} without a cache."
        raise Broken("recomputes", promise, seen, workload=workload, show=show(workload))
    return f"prefilled {prefilled['yours']} tokens, least possible {least}, without a cache {prefilled['none']}"


def cache_kit() -> type:
    from minisgl.testing.cache import CacheConformance

    return CacheConformance


def part_gate(part: str, says: str, make: Make) -> Gate:
    run = run_life(part, make)
    return Gate(part, says, search(make, run, tries=250, seconds=0.8, show=show_life), part=f"radix.{part}")


GATES = (
    part_gate("match", "the longest cached prefix is found", make_match),
    part_gate("split", "paths part inside an edge, and nothing is lost", make_split),
    part_gate("lock", "what is in use is counted, and only that", make_lock),
    part_gate("evict", "the least recently used goes, from the ends, and enough of it", make_evict),
    conformance(cache_kit, make_cache, lives=60),
    Gate("promises", "answers are right and pages have one owner", search(make_run, run_run, seconds=1.0, show=show)),
    Gate("counts", "no handbook is computed twice", count_prefill),
    greedy(["cache=naive"], ["page_size=16", "max_prefill_tokens=64"]),
    facts(["match", "lock", "unlock", "insert"]),
)
