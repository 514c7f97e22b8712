"""Lab `radix`: the student's cache lives beside a dictionary (`minisgl.testing.cache.CacheModel`), part by part; then
whole runs on the simulated engine. It asks the cache only what the scheduler may ask, so any structure will do.

A life is a list of events: ``["insert", ids]``, ``["match", ids]``, ``["lock", name, ids]``, ``["grow", name, ids]``
(what a lock holds becomes longer), ``["unlock", name]``, ``["evict", pages]``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from minisgl.kvcache import Key
from minisgl.lab.conform import conformance, greedy
from minisgl.lab.gate import Broken, Gate, Invalid, Student, search
from minisgl.lab.served import facts
from minisgl.lab.sim import jobs_of, least_prefill, random_workload, shipped_cache, show, simulate
from minisgl.testing.cache import CacheModel, Prefix
from minisgl.testing.drive import make_plugin

POOL = 400
"""Pages that a life may take; more is never needed."""


class Life:
    """A cache, and the dictionary beside it. ``part`` is what is on trial: what goes wrong is blamed on it."""

    def __init__(self, cache: Any, page_size: int, part: str):
        self.cache, self.model, self.page_size, self.part = cache, CacheModel(page_size), page_size, part
        self.held: dict[int, tuple[Any, Prefix]] = {}  # what was locked, by its name in the workload
        self.free = list(range(POOL))
        self.event = 0
        self.gained = 0  # pages that got their first user by the last lock

    def broken(self, cause: str, promise: str, seen: str, page: int | None = None) -> Broken:
        return Broken(cause, promise, seen, step=self.event, page=page)

    def live(self, events: list[list[Any]]) -> None:
        """All events, each judged."""
        for self.event, (kind, *args) in enumerate(events, 1):
            act = getattr(self, kind)
            try:
                act(*args)
                self.counts(kind)
            except AssertionError as error:
                promise = "The cache's own assertions hold."
                raise self.broken(self.cause(kind), promise, f"{error or 'One failed'}, in `{kind}`.") from error
            try:
                self.cache.check()
            except AssertionError as error:
                promise = "The cache finds nothing wrong with itself (`check`)."
                raise self.broken(self.cause(kind), promise, f"After `{kind}`: {error}.") from error

    def cause(self, kind: str) -> str:
        """What an event that went wrong is blamed on, where nothing better is known."""
        if self.part == "lock":
            return "lock-path"
        return "split-links" if self.part == "split" else "counts"

    # ---- events ------------------------------------------------------------------------------------------

    def key(self, ids: list[int]) -> tuple[Key, Prefix]:
        whole = len(ids) // self.page_size * self.page_size
        return Key(None, np.asarray(ids, np.int64)), Prefix(None, tuple(ids[:whole]))

    def match(self, ids: list[int]) -> tuple[Any, Prefix]:
        key, prefix = self.key(ids)
        expected = self.model.match(prefix)
        path = [self.model.pages[part] for part in self.model.path(expected)]
        found, right = self.cache.match(key), [page.number for page in path]
        pages = list(found.pages)
        if pages != right:
            promise = "match finds the longest cached prefix, in whole pages."
            seen = f"Of {_tokens(ids, self.page_size)} pages {right} are cached; it found {[int(p) for p in pages]}."
            raise self.broken(self.why_not(pages, right, prefix), promise, seen)
        unlocked = sum(page.users == 0 for page in path)
        if found.unlocked != unlocked:
            promise = "match says how many of its pages nobody has locked."
            seen = f"{unlocked} of {len(right)} are unlocked; it says {found.unlocked}."
            raise self.broken(self.cause("match"), promise, seen)
        return found.handle, expected

    def why_not(self, pages: list[int], right: list[int], prefix: Prefix) -> str:
        """The cause of a wrong match."""
        if self.part != "match":
            return self.cause("match")
        if pages[: len(right)] == right or pages != right[: len(pages)]:
            return "match-long"
        return "whole-prompt" if not pages and len(right) * self.page_size < len(prefix.ids) else "match-short"

    def insert(self, ids: list[int]) -> None:
        handle, prefix = self.store(None, ids)
        if self.part == "evict":  # used now, by its end too, whatever a cache makes of an offer
            self.cache.lock(handle)
            self.cache.unlock(handle)
            self.model.lock(prefix)
            self.model.lock(prefix, -1)

    def store(self, base: tuple[Any, Prefix] | None, ids: list[int]) -> tuple[Any, Prefix]:
        key, prefix = self.key(ids)
        start = len(base[1].ids) // self.page_size if base else 0
        want = len(prefix.ids) // self.page_size - start
        if want > len(self.free):
            raise Invalid
        mine, self.free = self.free[:want], self.free[want:]
        inserted = self.cache.insert(base[0] if base else None, key, start, np.asarray(mine, np.int32))
        held = self.model.insert(prefix, start, mine)
        if list(inserted.pages) != held:
            promise = "insert answers with the pages that the cache holds from now on."
            seen = f"Offered {mine}; it holds {held} and says {[int(page) for page in inserted.pages]}."
            raise self.broken("frees-before-remap", promise, seen)
        self.free += sorted(set(mine) - set(held))
        return inserted.handle, prefix

    def lock(self, name: int, ids: list[int]) -> None:
        if name in self.held:
            raise Invalid
        handle, prefix = self.match(ids)
        self.gained = sum(self.model.pages[part].users == 0 for part in self.model.path(prefix))
        self.cache.lock(handle)
        self.model.lock(prefix)
        self.held[name] = handle, prefix

    def grow(self, name: int, more: list[int]) -> None:
        """What a scheduler does when a prompt was computed: offer it below what is locked, lock that instead."""
        base = self.taken(name)
        longer = self.store(base, [*base[1].ids, *more])
        self.cache.lock(longer[0])
        self.model.lock(longer[1])
        self.cache.unlock(base[0])
        self.model.lock(base[1], -1)
        self.held[name] = longer

    def unlock(self, name: int) -> None:
        handle, prefix = self.taken(name)
        self.cache.unlock(handle)
        self.model.lock(prefix, -1)

    def taken(self, name: int) -> tuple[Any, Prefix]:
        if name not in self.held:
            raise Invalid
        return self.held.pop(name)

    def evict(self, count: int) -> None:
        if count < 1:
            raise Invalid
        before, evictable = dict(self.model.pages), self.model.evictable
        numbers = {page.number: prefix for prefix, page in before.items()}
        gone = [int(page) for page in self.cache.evict(count)]
        for page in gone:
            if page not in numbers or gone.count(page) > 1:
                seen = f"Page {page} is not the cache's, or was given up twice: {gone}."
                raise self.broken("counts", "A page is given up once, by who has it.", seen, page)
            if before[numbers[page]].users:
                seen = f"Page {page} was given up, and {before[numbers[page]].users} still use it."
                raise self.broken("evict-locked", "What is locked is not evicted.", seen, page)
        if len(gone) < min(count, evictable):
            seen = f"{count} pages were wanted, {evictable} could go, {len(gone)} went."
            raise self.broken("evict-few", "evict gives up as many as are wanted, if they can go.", seen)
        rest = {prefix for prefix in before if before[prefix].number not in gone}
        for prefix in rest:
            if any(part not in rest for part in self.model.path(prefix)):
                page = next(p for p in gone if numbers[p] in list(self.model.path(prefix)))
                seen = f"Page {page} went, and page {before[prefix].number}, behind it, stayed."
                raise self.broken("evict-middle", "Prefixes are given up from their ends.", seen, page)
        right = self.model.evict(len(gone))
        if set(gone) != right:
            seen = f"Pages {sorted(gone)} went; the least recently used were {sorted(right)}."
            raise self.broken("evict-order", "The least recently used goes first.", seen)
        self.free += gone

    def counts(self, kind: str) -> None:
        """``held`` and ``evictable`` are what the dictionary says."""
        if self.cache.held != len(self.model.pages):
            seen = f"After `{kind}` it holds {len(self.model.pages)} pages; `held` says {self.cache.held}."
            raise self.broken("counts", "`held` counts the cache's pages.", seen)
        right, says = self.model.evictable, self.cache.evictable
        if says != right:
            cause = self.cause(kind)
            if kind == "lock" and says < right:  # pages that had a user before were counted as if they had none
                cause = "lock-too-much" if self.gained else "split-users"
            seen = f"After `{kind}` {right} pages have no user; `evictable` says {says}."
            raise self.broken(cause, "`evictable` counts the pages that nobody uses.", seen)


def run_life(part: str) -> Callable[[Student, dict[str, Any]], None]:
    def run(student: Student, workload: dict[str, Any]) -> None:
        size = workload["page_size"]
        if size < 1:
            raise Invalid

        def live(events: list[list[Any]]) -> None:
            Life(make_cache(student, size), size, part).live(events)

        try:
            live(workload["events"])
        except Broken as broken:
            if broken.cause == "evict-order" and _lives(live, [e for e in workload["events"] if e[0] != "match"]):
                broken.cause = "match-writes"  # all is well where nobody only looks
            if broken.cause == "lock-path" and _lives(live, _no_split(size)):
                broken.cause = "split-users"  # all is well where nothing is split
            elif broken.cause == "split-users" and not _lives(live, _no_split(size)):
                broken.cause = "lock-path"
            raise

    return run


def _lives(live: Callable[[list[list[Any]]], None], events: list[list[Any]]) -> bool:
    """Whether nothing goes wrong in this life."""
    try:
        live(events)
    except Broken:
        return False
    return True


def _no_split(size: int) -> list[list[Any]]:
    """A path of two edges, locked to its end: nothing has to be split."""
    first, both = [0] * size, [0] * size + [1] * size
    return [["insert", first], ["insert", both], ["lock", 0, both], ["lock", 1, first], ["unlock", 1], ["unlock", 0]]


def make_cache(student: Student, page_size: int) -> Any:
    """The student's cache. If its options still have the reference's ``compare``: without C++."""
    schema = student.host.schema("cache", student.lab.name)
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
        events.append(["match", rng.choice(stored)])
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


def _tokens(ids: list[int], page_size: int) -> str:
    pages = [" ".join(map(str, ids[i : i + page_size])) for i in range(0, len(ids), page_size)]
    return f"[{' | '.join(pages)}]"


def show_life(workload: dict[str, Any]) -> str:
    """One line an event; tokens in pages."""
    size = workload["page_size"]
    lines = [f"a new cache, pages of {size} token{'s' * (size > 1)}"]
    for number, (kind, *args) in enumerate(workload["events"], 1):
        said = [_tokens(arg, size) if isinstance(arg, list) else str(arg) for arg in args]
        lines.append(f"{number}. {kind} {' '.join(said)}")
    return "\n".join(lines)


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


def part_gate(part: str, says: str, make: Callable[[random.Random, int], dict[str, Any]]) -> Gate:
    return Gate(part, says, search(make, run_life(part), tries=250, seconds=0.8, show=show_life), part=f"radix.{part}")


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
