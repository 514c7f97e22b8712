"""What the random workloads of the gates contain: each kind of event and each rule occurs in 300 of them."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from minisgl.chapters.lab.gates import draft, policy, slo
from minisgl.chapters.lab.grader import timing_histories
from minisgl.chapters.lab.grader.page_histories import CACHE, FAILED, LENGTHS, Rules, make_history

WORKLOADS = 300


def pages_of(event: list[Any]) -> list[int]:
    """Return the pages whose owner an event of lab `ledger` changes."""
    return list(event[-1]) if event[0] in ("allocate", "cache", "evict", "retire") else []


def count_ledger(events: list[list[Any]], seen: Counter[str]) -> None:
    """Count the events and the findings of a history, and its unusual states."""
    rules, told, rows = Rules(), set[int](), dict[int, int]()
    for event in events:
        kind, pages = event[0], pages_of(event)
        unread = {page for page, step in rules.until.items() if step > rules.read_step}
        held = {page for page, owner in rules.owner.items() if owner != CACHE}
        found = rules.apply(event)
        seen[kind] += 1
        seen.update(f"{kind}: {each.rule}" for each in found)
        seen["a page twice"] += len(set(pages)) < len(pages)
        seen["a later finding about a page"] += bool(told & {each.page for each in found})
        seen["an event after a finding about its page"] += bool(told & set(pages)) and not found
        seen["evicted page of a request"] += kind == "evict" and bool(held & set(pages))
        seen["allocated in flight, and given away"] += kind in ("cache", "retire") and bool(told & unread & set(pages))
        seen["the engine failed"] += kind == "finish" and event[2] == FAILED
        told |= {each.page for each in found if each.page is not None}
        if kind == "launch":
            places = [tuple(update[:2]) for update in event[3]]
            seen["a column twice"] += len(set(places)) < len(places)
            seen["thousands of columns"] += any(column > 2_000 for _, column in places)
            seen["an update of a row that the step has not"] += not {r for r, _ in places} <= {r for r, _ in event[2]}
            seen["a row again"] += any(rows.get(row, uid) != uid for row, uid in event[1])
            rows.update(event[1])
            seen["two unread steps"] += rules.launched > rules.read_step + 1


def test_ledger() -> None:
    """Histories of lab `ledger` have each event, each finding where it can occur, and the states after findings."""
    rng, seen = random.Random(1), Counter[str]()
    for size in range(WORKLOADS):
        count_ledger(make_history(rng, size, "requests")["events"], seen)
    expected = [*LENGTHS, "allocate: owner", "allocate: in-flight", "cache: owner", "evict: owner", "retire: owner"]
    expected += ["launch: table", "retract: leak", "finish: leak", "finish: reply", "a page twice"]
    expected += ["a later finding about a page", "an event after a finding about its page", "evicted page of a request"]
    expected += ["allocated in flight, and given away", "the engine failed", "a column twice", "thousands of columns"]
    expected += ["an update of a row that the step has not", "a row again", "two unread steps"]
    assert not [name for name in expected if not seen[name]], seen


def test_policy() -> None:
    """Steps of lab `policy` have every kind of request, in mixed orders, and budgets that run out of each resource."""
    rng, seen = random.Random(1), Counter[str]()
    for size in range(policy.CORNERS + 1, policy.CORNERS + 1 + WORKLOADS):
        step = policy.make(rng, size)
        if "answers" not in step:
            seen["run"] += 1
            continue
        running, waiting = policy.requests_of(step)
        kinds = [bool(r.num_remaining_tokens) for r in running]
        seen["a prompt before a decode row"] += kinds != sorted(kinds)
        seen["two begun prompts"] += sum(kinds) > 1
        seen["a decode row needs a page"] += any(r.num_new_pages for r in running)
        seen["no page"] += step["pages"] == 0 and any(r.num_new_pages for r in running)
        seen["no row"] += step["slots"] == 0 and bool(waiting)
        seen["decode rows have the tokens"] += kinds.count(False) >= step["chunk"]
        seen["prompts keep tokens"] += step["prefill"] > 0 and kinds.count(False) > step["chunk"] - step["prefill"]
        seen["reserved pages"] += bool(step["reserved"] and step["priced"] and waiting)
        seen["growth"] += bool(step["growth"] and len(waiting) > 1)
        seen["skipped"] += bool(step["skipped"] and running)
        for other in {r.uid for r in running}, {w.uid for w in waiting}:
            seen["same prefix as a " + ("waiting" if other & {w.uid for w in waiting} else "running")] += any(
                w.same_prefix_req in other for w in waiting
            )
        seen["uid 0"] += 0 in {r.uid for r in (*running, *waiting)}
        priorities = [w.priority for w in waiting]
        seen["a later request is more urgent"] += priorities != sorted(priorities)
        seen["equally cached"] += len({w.num_cached_tokens for w in waiting}) < len(waiting)
    expected = ["run", "a prompt before a decode row", "two begun prompts", "a decode row needs a page", "no page"]
    expected += ["no row", "decode rows have the tokens", "prompts keep tokens", "reserved pages", "growth", "skipped"]
    expected += ["same prefix as a waiting", "uid 0", "equally cached", "a later request is more urgent"]
    assert not [name for name in expected if not seen[name]], seen


def test_slo() -> None:
    """Steps of lab `slo` have both classes in every state, and budgets that run out of tokens, pages and rows."""
    rng, seen = random.Random(1), Counter[str]()
    for size in range(1, WORKLOADS + 1):
        step = slo.make_tight(rng, 1 + size % 30) if size % 2 else slo.make_step(rng, 1 + size % 60)
        waiting, running = slo.views_of(step)
        classes = {True: "interactive", False: "batch"}
        for r in (*waiting, *running):
            kind = "begun" if getattr(r, "num_remaining_tokens", 0) else "decodes" if r in running else "waits"
            kind = "left out" if getattr(r, "same_prefix_req", None) is not None else kind
            seen[f"{classes[r.priority <= step['interactive']]} {kind}"] += 1
        shown = [
            r.priority <= step["interactive"] for r in (*running, *waiting) if not getattr(r, "same_prefix_req", 0)
        ]
        left_out = any(w.same_prefix_req and w.priority <= step["interactive"] for w in waiting)
        seen["only a left out request is interactive"] += left_out and not any(shown)
        batch = [w for w in waiting if w.priority > step["interactive"]]
        seen["all batch prompts are left out"] += bool(batch) and all(w.same_prefix_req is not None for w in batch)
        seen["no row"] += step["rows"] == 0 and bool(waiting)
        seen["too few rows"] += 0 < step["rows"] < len(waiting)
        seen["more decode rows than step_tokens"] += sum(r.num_remaining_tokens == 0 for r in running) > step["step"]
        orders = [r.arrival for r in sorted(running, key=lambda r: r.admission_order)]
        seen["admitted in another order than arrived"] += orders != sorted(orders)
        seen["no share"] += step["share"] == 0
        seen["all is shared"] += step["share"] == 100
        seen["negative priority"] += any(r.priority < 0 for r in (*waiting, *running))
    states = ("begun", "decodes", "waits", "left out")
    expected = [f"{name} {state}" for name in ("interactive", "batch") for state in states]
    expected += ["only a left out request is interactive", "no row", "too few rows", "negative priority", "no share"]
    expected += ["more decode rows than step_tokens", "admitted in another order than arrived", "all is shared"]
    expected += ["all batch prompts are left out"]
    assert not [name for name in expected if not seen[name]], seen


def test_meter() -> None:
    """Histories of lab `meter` have each event, each kind of row, equal times, late rows of ended requests, any end."""
    rng, seen = random.Random(1), Counter[str]()
    for size in range(1, WORKLOADS + 1):
        history = timing_histories.make_history(rng, size)
        time = sampled = -1
        open_, gained = set[int](), set[int]()
        seen["two meters"] += history["meters"] == 2
        for kind, wait, *args in history["events"]:
            time += wait
            seen[kind] += 1
            seen["add" + ": uid 0" * (args == [0])] += 1
            if kind == "add":
                open_.add(args[0])
            elif kind == "finish":
                open_.discard(args[0])
                seen["finish: " + timing_histories.REASONS[args[1]]] += 1
                seen["an end without a token"] += args[0] not in gained
            elif kind == "retract":
                seen["a retraction with tokens"] += args[0] in gained
            for uid, what in args[0] if kind == "step" else ():
                seen[timing_histories.WHAT[what]] += 1
                seen["a row of an ended request"] += uid not in open_
                if what in (0, 3, 4):
                    gained.add(uid)
            seen["no wait between steps"] += kind == "step" and time == sampled
            sampled = time if kind == "step" else sampled
    expected = ["add", "step", "same", "retract", "finish", *timing_histories.WHAT, "two meters", "add: uid 0"]
    expected += ["finish: " + reason for reason in timing_histories.REASONS]
    expected += ["an end without a token", "a retraction with tokens", "a row of an ended request"]
    expected += ["no wait between steps"]
    assert not [name for name in expected if not seen[name]], seen


def test_draft() -> None:
    """Histories of lab `draft` have each event and each kind of question, and texts in which groups occur again."""
    rng, seen = random.Random(1), Counter[str]()
    for size in range(1, WORKLOADS + 1):
        turns = draft.make_turns(rng, 1 + size % 80)
        before: set[int] = set()
        for event in turns["events"]:
            kind = next(iter(event))
            seen[kind] += 1
            if kind == "admit":
                seen["uid 0"] += event["admit"] == 0
                seen["a request runs again"] += event["admit"] in before
                before.add(event["admit"])
            seen["several requests gain"] += kind == "gain" and len(event["gain"]) > 1
            seen["a request gains one token"] += kind == "gain" and any(len(run) == 1 for _, run in event["gain"])
            for _, unread, limit in event["ask"]:
                seen[f"unread {unread}"] += 1
                seen["limit 0"] += limit == 0
                seen["limit max_drafts"] += limit == turns["drafts"]
        seen["the group is one token"] += turns["match"] == 1
    expected = ["admit", "gain", "remove", "uid 0", "a request runs again", "several requests gain", "unread 0"]
    expected += ["unread 1", "limit 0", "limit max_drafts", "a request gains one token", "the group is one token"]
    assert not [name for name in expected if not seen[name]], seen
