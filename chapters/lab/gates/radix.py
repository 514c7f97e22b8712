"""Gates of lab `radix`: histories of the student's cache, part by part, then whole runs on the simulated engine.

Each answer of the cache is compared with a dictionary, `minisgl.testing.cache.CacheModel`. The gates call only the
methods that the scheduler calls, so the cache may have any structure. The module
`minisgl.chapters.lab.grader.cache_histories` describes histories.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from minisgl.chapters.lab.grader.cache_histories import SPACES, History, show_history
from minisgl.chapters.lab.grader.conformance import conformance, greedy
from minisgl.chapters.lab.grader.eviction_trace import OPTION, OWN, times_of_lru
from minisgl.chapters.lab.grader.gate import Broken, Gate, Invalid, Stretch, Student
from minisgl.chapters.lab.grader.held import container_sizes
from minisgl.chapters.lab.grader.search import search
from minisgl.chapters.lab.grader.server_gate import facts
from minisgl.chapters.lab.grader.simulated_workloads import (
    jobs_of,
    least_prefill,
    random_workload,
    shipped_cache,
    show,
    simulate,
)
from minisgl.plugins.cache.base import Key
from minisgl.testing.drive import make_plugin

Make = Callable[[random.Random, int], dict[str, Any]]
Play = Callable[[list[list[Any]]], None]
GENERAL = ("counts", "split-links", "lock-path", "match-short")
"""The causes that a wrong handling of the page size may look like."""


def run_history(part: str, make: Make) -> Callable[[Student, dict[str, Any]], None]:
    """Return the check of one part: play a history, and find the most precise cause of a failure.

    To find the cause, variants of the history are played on new caches.
    """
    known: dict[int, bool] = {}

    def passes_with_small_pages(student: Student) -> bool:
        """Return whether all of 120 random histories with pages of one token pass."""
        if id(student) not in known:
            made = [make(random.Random(seed), 1 + seed % 20) for seed in range(120)]
            histories = [history["events"] for history in made if history["page_size"] == 1]
            known[id(student)] = all(
                _passes(lambda events: History(make_cache(student, 1), 1, part).run(events), events)
                for events in histories
            )
        return known[id(student)]

    def run(student: Student, workload: dict[str, Any]) -> None:
        size, base, step = workload["page_size"], workload.get("base", 0), workload.get("step", 1)
        more = workload.get("space", 0), base, step
        if size < 1 or step < 1:
            raise Invalid

        def play(events: list[list[Any]]) -> None:
            History(make_cache(student, size), size, part, *more).run(events)

        old, new = [0] * size, [1] * size

        def match_counts_as_use() -> bool:
            """Return whether an eviction from two prefixes passes, but fails after a match of the older prefix."""
            two: list[list[Any]] = [["insert", old], ["insert", new]]
            return _passes(play, [*two, ["evict", 1]]) and not _passes(play, [*two, ["match", old], ["evict", 1]])

        def users_are_a_flag() -> bool:
            """Return whether one lock of a prefix and its unlock pass, but two locks of it and one unlock fail."""
            one: list[list[Any]] = [["insert", old], ["lock", 0, old]]
            return _passes(play, [*one, ["unlock", 0]]) and not _passes(play, [*one, ["lock", 1, old], ["unlock", 0]])

        def second_lock_of_a_handle() -> bool:
            """Return whether two locks of a prefix that is split are right, but not if they have one handle."""
            path, other = [*old, *new, *old], [*old, *(3 for _ in old)]
            ends: list[list[Any]] = [["unlock", 0], ["unlock", 1], ["unlock", 2]]
            begin: list[list[Any]] = [["insert", path], ["lock", 0, path]]
            apart: list[list[Any]] = [*begin, ["lock", 1, other], ["lock", 2, path], *ends]
            again: list[list[Any]] = [*begin, ["lock", 1, other], ["again", 2, 0], *ends]
            first: list[list[Any]] = [*begin, ["lock", 2, path], ["lock", 1, other], *ends]
            return _passes(play, apart) and _passes(play, first) and not _passes(play, again)

        def parent_is_not_offered() -> bool:
            """Return whether an edge of two pages is evicted as a whole, but not a node and then its parent."""
            both = [*old, *new]
            whole: list[list[Any]] = [["insert", both], ["evict", 2]]
            apart: list[list[Any]] = [["insert", old], ["insert", both], ["evict", 2]]
            return _passes(play, whole) and not _passes(play, apart)

        def parent_counts_as_used() -> bool:
            """Return whether the oldest prefix is evicted first, but not if it had a child that was evicted before."""
            newer: list[list[Any]] = [["insert", [2] * size], ["evict", 1]]
            leaf: list[list[Any]] = [["insert", old], *newer]
            parent: list[list[Any]] = [["insert", old], ["insert", [*old, *new]], *newer, ["evict", 1]]
            return _passes(play, leaf) and _passes(play, parent[:-1]) and not _passes(play, parent)

        def mixes_namespaces() -> bool:
            """Return whether a prefix is found in its namespace None, but another one not in its own, or in both."""

            def is_wrong(space: int, other: int) -> bool:
                events: list[list[Any]] = [["insert", old], ["match", old, other]]
                return not _passes(lambda e: History(make_cache(student, size), size, part, space).run(e), events)

            return not is_wrong(0, 0) and any(is_wrong(at, i) for at in range(len(SPACES)) for i in (0, 1))

        def handle_stays() -> bool:
            """Return whether only the unlock of a prefix whose lock split an edge fails."""
            split: list[list[Any]] = [["insert", [*old, *new]], ["lock", 0, old]]
            whole: list[list[Any]] = [["insert", old], ["lock", 0, old], ["unlock", 0]]
            return _passes(play, whole) and _passes(play, split) and not _passes(play, [*split, ["unlock", 0]])

        def handle_is_shared() -> bool:
            """Return whether the history passes without the matches between a match and its lock."""
            plain = [event[:3] if event[0] == "lock_after" else event for event in workload["events"]]
            plain = [["lock", *event[1:]] if event[0] == "lock_after" else event for event in plain]
            return plain != workload["events"] and _passes(play, plain)

        try:
            play(workload["events"])
        except Broken as broken:
            if handle_is_shared():
                broken.cause = "shared-result"
                raise
            without_match = [event for event in workload["events"] if event[0] != "match"]
            if broken.cause == "evict-order" and (_passes(play, without_match) or match_counts_as_use()):
                broken.cause = "match-writes"  # the history passes if its matches are left out
            if broken.cause in ("evict-order", "evict-few") and parent_is_not_offered():
                broken.cause = "not-offered"
            if broken.cause == "evict-order" and parent_counts_as_used():
                broken.cause = "evict-parent"
            if broken.cause == "lock-path" and _passes(play, _no_split(size)):
                broken.cause = "split-users"  # locks pass while no edge is split
            elif broken.cause == "split-users" and not _passes(play, _no_split(size)):
                broken.cause = "lock-path"
            if broken.cause in (*GENERAL, "match-long", "split-users") and mixes_namespaces():
                broken.cause = "namespace"
            if broken.cause in ("lock-path", "counts") and users_are_a_flag():
                broken.cause = "users-flag"  # one lock of a prefix passes, two locks of it fail
            if broken.cause in (*GENERAL, "split-users") and second_lock_of_a_handle():
                broken.cause = "lock-again"
            if broken.cause in (*GENERAL, "split-users", "lock-too-much", "not-offered") and handle_stays():
                broken.cause = "handle"
            if size > 1 and broken.cause in GENERAL and passes_with_small_pages(student):
                broken.cause = "page-size"
            raise

    return run


def _passes(play: Play, events: list[list[Any]]) -> bool:
    """Return whether a history passes."""
    try:
        play(events)
    except Exception:
        return False
    return True


def _no_split(size: int) -> list[list[Any]]:
    """Return a history with a path of two edges that is locked to its end, so that no edge has to be split."""
    first, both = [0] * size, [0] * size + [1] * size
    return [["insert", first], ["insert", both], ["lock", 0, both], ["lock", 1, first], ["unlock", 1], ["unlock", 0]]


def make_cache(student: Student, page_size: int) -> Any:
    """Return the student's cache. An option ``compare``, which the reference has, is set so that no C++ is needed."""
    options = {"compare": "numpy"} if "compare" in student.options() else {}
    made = student.make(student.config(**options), page_size=page_size)
    for name in ("match", "lock", "unlock", "insert", "evict", "check"):
        if not callable(getattr(made, name, None)):
            promise = "The cache has the methods of the protocol `PrefixCache` in plugins/cache/base.py."
            raise Broken("lacks-method", promise, f"It has no method `{name}`.")
    return made


# ---- histories -------------------------------------------------------------------------------------------


def _ids(rng: random.Random, most: int) -> list[int]:
    return [rng.randint(0, 1) for _ in range(rng.randint(0, most))]


def make_match(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a history of inserts that need no split, and of matches that share any part of the inserted prompts.

    Each inserted prompt is new, or continues an earlier prompt at its end. In every 25th history, 70 prompts begin with
    different tokens.
    """
    page = rng.choice([1, 2, 3, 16])
    if size % 25 == 24:
        wide = [[i] * page for i in range(70)]
        head = rng.choice([[], [9] * page])
        inserts = [["insert", head], *(["insert", [*head, *ids]] for ids in wide)]
        matches = [["match", [*head, *ids, *_ids(rng, page)]] for ids in rng.sample(wide, 20)]
        return {"page_size": page, "events": [*inserts, *matches], "space": 0}
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
        events.append([rng.choice(["match", "match_other"]), rng.choice(stored)])
    return {"page_size": page, "events": events, **_place(rng), "space": rng.randrange(len(SPACES))}


def make_split(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a history of inserts and matches of random prompts, many of which diverge inside an edge."""
    page = rng.choice([1, 2, 3])
    kinds = ["insert", "insert", "match"]
    events = [[rng.choice(kinds), _ids(rng, 4 * page)] for _ in range(2 + min(size, 12))]
    return {"page_size": page, "events": events, **_place(rng)}


def _place(rng: random.Random) -> dict[str, int]:
    """Return a random namespace, and the number from which token ids and pages are counted, and the ids' steps."""
    base, step = rng.choice([0, 0, 1 << 17, 1 << 24]), rng.choice([1, 1, 1 << 8, 1 << 16, 1 << 24])
    return {"space": rng.choice([0, 0, rng.randrange(len(SPACES))]), "base": base, "step": step}


def make_lock(rng: random.Random, size: int, evict: bool = False) -> dict[str, Any]:
    """Return a history with locks, and with evictions if ``evict``."""
    page, spaces = rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2])
    locked: list[int] = []
    events: list[list[Any]] = []
    for i in range(3 + min(size, 22)):
        kinds = ["insert", "insert", "lock", "match"] + ["unlock", "grow", "again"] * bool(locked) + ["evict"] * evict
        kind = rng.choice(kinds)
        if kind == "lock":
            locked.append(i)
            events.append([kind, i, _ids(rng, 4 * page), *([1] if rng.randrange(spaces) else [])])
            if rng.random() < 0.3:
                events[-1] = ["lock_after", i, events[-1][2], _ids(rng, 4 * page)]
        elif kind == "again":
            events.append([kind, i, rng.choice(locked)])
            locked.append(i)
        elif kind == "unlock":
            events.append([kind, locked.pop(rng.randrange(len(locked)))])
        elif kind == "grow":
            events.append([kind, rng.choice(locked), _ids(rng, 3 * page)])
        elif kind == "evict":
            events.append([kind, rng.choice([0, 1, 1, 2, 2, 3, 3, 4, 5])])
        else:
            events.append([kind, _ids(rng, 4 * page), *([1] if rng.randrange(spaces) else [])])
    return {"page_size": page, "events": events, **_place(rng)}


def make_evict(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a history with locks and evictions.

    In half of the histories, an inserted prompt is matched before and after each eviction. Between, as many pages as
    were to be evicted may be inserted. In a third of the histories, all prompts are used in random order, and then all
    pages are evicted, a few at a time, which compares the whole order of eviction.
    """
    if rng.random() < 1 / 3:
        return _used_and_evicted(rng, size)
    history = make_lock(rng, size, evict=True)
    inserted = [event[1:] for event in history["events"] if event[0] == "insert"]
    if inserted and rng.random() < 0.5:
        events: list[list[Any]] = []
        for event in history["events"]:
            if event[0] != "evict":
                events.append(event)
                continue
            asked, more = ["match", *rng.choice(inserted)], ["insert", [9] * (history["page_size"] * event[1])]
            events += [asked, event, *([more] if rng.random() < 0.5 else []), asked]
        history["events"] = events
    return history


def _used_and_evicted(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a history that inserts prompts, locks and unlocks their prefixes in random order, and evicts all pages."""
    page = rng.choice([1, 1, 2])
    prompts = [_ids(rng, 3 * page) + _ids(rng, rng.choice([2, 20]) * page) for _ in range(2 + min(size, 5))]
    events: list[list[Any]] = [["insert", ids] for ids in prompts]
    calls = [(rng.random(), name) for name in range(min(size, 8)) for _ in range(2)]
    locked: set[int] = set()
    for _, name in sorted(calls):
        known = rng.choice(prompts)
        events.append(["unlock", name] if name in locked else ["lock", name, known[: rng.randint(0, len(known))]])
        locked.add(name)
    pages = sum(len(ids) // page for ids in prompts)
    while pages > 0:
        events.append(["evict", rng.randint(1, rng.choice([1, 3, 8]))])
        pages -= events[-1][1]
    return {"page_size": page, "events": [*events, ["evict", 1]], **_place(rng)}


# ---- whole runs ---------------------------------------------------------------------------------------------


def make_run(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a random workload for a whole run, with a policy and an order."""
    policy, order = rng.choice(
        [("mixed", "lpm"), ("mixed", "fcfs"), ("prefill_first", "fcfs"), ("decode_first", "lpm")]
    )
    return {**random_workload(rng, size), "policy": policy, "order": order, "overlap": rng.randint(0, 1)}


def run_promises(student: Student, workload: dict[str, Any]) -> None:
    """Run a workload through the real scheduler with the student's cache."""
    if workload["page_size"] < 1:
        raise Invalid
    policy = make_plugin("scheduler", workload["policy"], order=workload["order"])
    cache = make_cache(student, workload["page_size"])
    simulate(workload, cache, policy, overlap=bool(workload["overlap"]), causes=cause_of, thorough=True)


def cause_of(rule: str) -> str | None:
    """Return the lab's cause for a rule of the simulated engine, or for a message of the scheduler."""
    if rule in ("kv-content", "page-shared", "page-retired", "page-in-flight"):
        return "match-long" if rule == "kv-content" else "frees-before-remap"
    return "counts" if "pool" in rule or "ledger" in rule or "pages" in rule else None


def count_prefill(student: Student) -> str:
    """Count the prompt tokens that the engine computes for 42 requests with three common prefixes.

    Each prefix has as many tokens as a handbook of the course (384). Each page of a prefix should be computed only
    once, for all requests together.
    """
    long_path(student)
    long_edge(student)
    many_namespaces(student)
    many_prompts(student)
    rng = student.random
    jobs = [{"id": i + 1, "stem": rng.randrange(3), "shared": 384 - 16 * rng.randrange(3), "own": rng.randint(8, 40),
             "answer": rng.randint(4, 40), "arrive": 2 * i} for i in range(42)]  # fmt: skip
    workload = {"page_size": 16, "pages": 512, "slots": 16, "chunk": 128, "jobs": jobs}
    least = least_prefill(jobs_of(workload), 16)
    prefilled = {}
    for name, cache in (("none", shipped_cache("naive", 16)), ("yours", make_cache(student, 16))):
        report = simulate(workload, cache, make_plugin("scheduler", "mixed", order="lpm"), causes=cause_of)
        prefilled[name] = report.counts.prompt_tokens
    if prefilled["yours"] > 1.02 * least:
        promise = f"The engine prefills at most 1.02 times the least possible number of tokens in whole pages, {least}."
        seen = f"{prefilled['yours']} tokens were prefilled; {prefilled['none']} without a cache."
        raise Broken("recomputes", promise, seen, workload=workload, show=show(workload))
    yours, none = prefilled["yours"], prefilled["none"]
    return f"prefilled {yours} tokens, least possible in whole pages {least}, without a cache {none}"


def long_path(student: Student, pages: int = 1200) -> None:
    """Insert page after page, each below the prefix of the page before, then lock, match, unlock and evict all."""
    cache, ids = make_cache(student, 1), np.arange(pages, dtype=np.int32)
    handle: Any = None
    for i in range(pages):
        handle = cache.insert(handle, Key(None, ids[: i + 1]), i, ids[i : i + 1]).handle
    cache.lock(handle)
    found, locked = len(cache.match(Key(None, ids)).pages), cache.evictable_pages
    cache.unlock(handle)
    evicted = len(cache.evict(pages))
    if (found, locked, evicted) != (pages, 0, pages):
        promise = f"A prefix of {pages} pages, inserted page by page, is found, locked and evicted as a whole."
        seen = f"`match` found {found} pages; {locked} were evictable while locked; {evicted} were evicted at the end."
        raise Broken("counts", promise, seen)


def long_edge(student: Student, pages: int = 20_000) -> None:
    """Insert a prompt of 20,000 pages in one call, then match, lock, unlock and evict it, its last page first."""
    cache, ids = make_cache(student, 1), np.arange(pages, dtype=np.int32)
    cache.insert(None, Key(None, ids.copy()), 0, ids.copy())
    for cut in sorted({1, 64, 1000, pages - 1, *(student.random.randrange(pages) for _ in range(6))}):
        other = ids.copy()
        other[cut] = -1
        common = len(cache.match(Key(None, other)).pages)
        if common != cut:
            promise = "`match` finds the longest cached prefix, in whole pages."
            seen = (
                f"A prompt of {pages:,} tokens is cached. `match` of another prompt with the same first {cut:,} tokens "
            )
            seen += f"found {common:,} pages of one token."
            raise Broken("match-long" if common > cut else "match-short", promise, seen)
    found = cache.match(Key(None, ids))
    cache.lock(found.handle)
    locked = cache.evictable_pages
    cache.unlock(found.handle)
    last = [int(page) for page in cache.evict(1)]
    rest = len(cache.evict(pages - len(last)))
    if (len(found.pages), locked) != (pages, 0) or pages - 1 not in last or len(last) > 64 or rest + len(last) != pages:
        promise = f"A prompt of {pages:,} tokens is found and locked as a whole, and evicted from its end."
        seen = (
            f"`match` found {len(found.pages):,} pages; {locked:,} were evictable while locked; evict(1) returned "
            f"{len(last):,} pages, and then the eviction of all others {rest:,}."
        )
        many = len(last) > 64
        raise Broken("evict-many" if many else "match-short" if len(found.pages) < pages else "counts", promise, seen)


def same_times(student: Student) -> None:
    """Check that both halves of a split edge have the time of last use and the users of the edge.

    A cache without the skeleton's method `_split` is graded by what it evicts.
    """
    cache, ids = make_cache(student, 1), np.arange(3, dtype=np.int32)
    node: Any = getattr(cache.insert(None, Key(None, ids), 0, ids.copy()).handle, "node", None)
    cache.insert(None, Key(None, ids + 3), 0, ids + 3)
    if not hasattr(cache, "_split") or not hasattr(node, "stamp"):
        return
    counts_users = not student.by_messages and isinstance(getattr(node, "users", None), int)
    if counts_users:  # in another process, nothing can be set: gates *lock* and *evict* see the users there
        node.users = 2
    upper = cache._split(node, 1)
    if upper is None or not hasattr(upper, "stamp"):
        return
    if counts_users and (upper.users, node.users) != (2, 2):
        seen = f"The edge had 2 users. The upper half has {upper.users}, and the lower half {node.users}."
        raise Broken("split-users", "After a split, both halves have the users that the edge had.", seen)
    if upper.stamp != node.stamp:
        promise = "After a split, both halves have the time of last use that the edge had."
        seen = f"The upper half has the stamp {upper.stamp}, and the lower half {node.stamp}."
        raise Broken("split-stamp", promise, seen)


def unlocked_pages(student: Student) -> None:
    """Check that `match` does not count the pages of a node with users as unlocked.

    A cache whose nodes have no ``users`` is graded by gate *lock*, and so is a cache in another process, whose nodes
    can't be changed here.
    """
    if student.by_messages:
        return
    cache, ids = make_cache(student, 1), np.arange(3, dtype=np.int32)
    node: Any = getattr(cache.insert(None, Key(None, ids[:2]), 0, ids[:2].copy()).handle, "node", None)
    if not isinstance(getattr(node, "users", None), int):
        return
    cache.insert(None, Key(None, ids), 0, ids.copy())
    node.users = 1
    unlocked = cache.match(Key(None, ids)).unlocked
    if unlocked != 1:
        promise = "`MatchResult.unlocked` is the number of matched pages that have no user."
        seen = f"Two of three matched pages belong to a node with `users` 1, and one to a node with 0: {unlocked=}."
        raise Broken("unlocked", promise, seen)


def many_namespaces(student: Student, number: int = 500) -> None:
    """Check that the cache keeps nothing of namespaces whose last page was evicted, or that were only asked for."""
    cache = make_cache(student, 1)
    before = container_sizes(cache)
    for i in range(number):
        cache.match(Key(f"unknown {i}", np.zeros(1, np.int32)))
    grown = {name: n - before.get(name, 0) for name, n in container_sizes(cache).items()}
    if grown and max(grown.values()) >= number // 2:
        name = max(grown, key=grown.__getitem__)
        seen = f"{number} namespaces without a page were matched. The cache has {grown[name]} entries more in {name}."
        raise Broken("match-writes", "A match in a namespace without pages adds nothing.", seen)
    for i in range(number):
        cache.insert(None, Key(f"space {i}", np.zeros(1, np.int32)), 0, np.array([i], np.int32))
    evicted = len(cache.evict(number))
    cache.insert(None, Key("one more", np.zeros(1, np.int32)), 0, np.array([number], np.int32))
    cache.evict(1)  # a queue with outdated entries may be cleaned up only now
    left = {
        name: n - before.get(name, 0)
        for name, n in container_sizes(cache).items()
        if n - before.get(name, 0) >= number // 2
    }
    if evicted == number and left:
        where = ", ".join(f"{n} in {name}" for name, n in left.items())
        seen = f"{number} namespaces had a page each, and all were evicted. The cache still keeps entries: {where}."
        raise Broken("namespace-stays", "The cache keeps nothing of a namespace without pages.", seen)


def many_uses(student: Student, number: int = 2000) -> None:
    """Check that the cache does not keep something of each match, lock and unlock of the same prefixes."""
    cache, ids = make_cache(student, 1), np.arange(8, dtype=np.int32)
    cache.insert(None, Key(None, ids), 0, ids.copy())

    def use(pages: int) -> None:
        found = cache.match(Key(None, ids[:pages]))
        cache.lock(found.handle)
        cache.unlock(found.handle)

    use(4)  # splits the edge
    before = container_sizes(cache)
    for i in range(number):
        use(4 if i % 2 else 8)
    check_growth(cache, before, number, f"Two cached prefixes were matched, locked and unlocked {number:,} times")
    handles = [cache.match(Key(None, ids)).handle for _ in range(300)]
    for handle in handles:
        cache.lock(handle)
    for users in range(len(handles), 0, -1):
        if cache.evictable_pages:
            seen = f"A prefix of 8 pages was locked 300 times. With {users} locks, {cache.evictable_pages=}."
            raise Broken("users-flag", "Pages are evictable only if no user is left.", seen)
        cache.unlock(handles.pop())
    if cache.evictable_pages != 8:
        seen = f"A prefix of 8 pages was locked and unlocked 300 times. Then {cache.evictable_pages=}."
        raise Broken("users-flag", "Pages are evictable if no user is left.", seen)


def many_prompts(student: Student, number: int = 1000) -> None:
    """Check that the cache does not keep something of each prompt that was inserted, used and evicted."""
    cache, first = make_cache(student, 1), np.arange(4, dtype=np.int32)
    cache.insert(None, Key(None, first), 0, first.copy())
    before = container_sizes(cache)
    for i in range(number):
        base = cache.match(Key(None, first))
        cache.lock(base.handle)
        key, page = Key(None, np.append(first, np.int32(100 + i))), np.array([4], np.int32)
        cache.insert(None, key, 0, np.append(first, page))
        if i % 2:
            cache.insert(None, key, 0, np.append(first, page + 1))  # the same prompt again: nothing is added
        cache.evict(1)
        cache.unlock(base.handle)
    check_growth(cache, before, number, f"{number:,} prompts of 5 pages were inserted and their last page was evicted")


def check_growth(cache: Any, before: dict[str, int], number: int, what: str) -> None:
    """Check that no container of a cache has grown by ``number`` elements."""
    grown = {name: n - before.get(name, 0) for name, n in container_sizes(cache).items()}
    name = max(grown, key=grown.__getitem__, default="")
    if grown and grown[name] >= number:
        seen = f"{what}. The cache now has {grown[name]:,} elements more in {name}."
        raise Broken("grows", "The cache does not keep something of each use of a prefix.", seen)


def cache_kit() -> type:
    """Import and return the conformance kit of prefix caches."""
    from minisgl.testing.cache import CacheConformance

    return CacheConformance


def part_gate(part: str, says: str, make: Make) -> Gate:
    """Return the gate of one part."""
    run = run_history(part, make)
    searched = search(make, run, tries=250, seconds=0.8, show=show_history)

    def check(student: Student) -> str:
        note = searched(student)
        if part == "match" and student.replay is None:
            unlocked_pages(student)
        if part == "split" and student.replay is None:
            same_times(student)
        if part == "lock" and student.replay is None:
            many_uses(student)
        return note

    return Gate(part, says, check, part=f"radix.{part}")


GATES = (
    part_gate("match", "the longest cached prefix is found", make_match),
    part_gate("split", "an edge is split where two prompts diverge, and no page is lost", make_split),
    part_gate("lock", "the pages of locked prefixes, and no others, count as in use", make_lock),
    part_gate("evict", "the least recently used pages are evicted, from the ends of prefixes", make_evict),
    conformance(cache_kit, make_cache, histories=60),
    Gate(
        "promises",
        "answers are right and each page has one owner",
        search(make_run, run_promises, seconds=1.0, show=show),
    ),
    Gate("counts", "no handbook is computed twice", count_prefill),
    greedy(["cache=naive"], ["page_size=16", "max_prefill_tokens=64"]),
    facts(["match", "lock", "unlock", "insert"]),
)


TIMES, ENOUGH = "times the prompt tokens that LRU finds", 1.2


def measure_stretch(student: Student) -> tuple[str, bool]:
    """Compare the student's cache with LRU on traces with long prompts that never recur."""
    times = times_of_lru(student)
    return f"{times:.2f} {TIMES}", round(times, 2) >= ENOUGH


STRETCH = Stretch(
    f"On traces with long prompts that never recur, LRU has the number 1.00. Find {ENOUGH} times as many prompt tokens "
    f"with another order of eviction, which an option `{OPTION}={OWN}` of your cache selects. The traces are new in "
    "each run.",
    measure_stretch,
)
