"""Gates of lab `ledger`: the student's auditor observes healthy runs and runs with a bug planted into the scheduler.

The auditor must be silent over healthy runs. Each planted bug records the page or the request that it affects, and the
auditor must name that page or request. Histories of hook calls without an engine compare each finding
(`minisgl.chapters.lab.grader.page_histories`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np

from minisgl.chapters.lab.grader.executed_lines import REQUESTS, lines_of_a_decode_step
from minisgl.chapters.lab.grader.gate import Broken, Gate, Invalid, Stretch, Student
from minisgl.chapters.lab.grader.observer_runs import WatchedDrive, observer, run, silence_others, watch
from minisgl.chapters.lab.grader.page_histories import (
    FAILED,
    Expected,
    Rules,
    all_changes,
    large_history,
    make_history,
    show_history,
    special_histories,
)
from minisgl.chapters.lab.grader.search import search
from minisgl.chapters.lab.grader.server_gate import Served, facts
from minisgl.chapters.lab.grader.simulated_workloads import random_workload, show
from minisgl.core import Output, Req
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.cache.prefix import PrefixCacheManager
from minisgl.scheduler.cache_manager import CacheManager
from minisgl.scheduler.page_allocator import CACHE, OwnerTable, PageAllocator
from minisgl.scheduler.scheduler import Scheduler
from minisgl.testing.planted import ArrivalOrderPolicy
from minisgl.testing.small import no_lookahead

PAGES = {f"minisgl_pages_{what}" for what in ("allocated", "cached", "evicted", "freed")}
STEPS = {"minisgl_batch_scheduled", "minisgl_step_finished"}
Owned = Sequence[tuple[int, Any]]  # (request, its pages)
RANDOM = 24
"""How many random workloads the gate of a part runs at least."""
SECONDS = 0.5
"""Seconds of processor time in a gate. The fixed workloads of the gate run however long they take."""


@dataclass
class Damage:
    """The requests and pages that a planted bug affected. The auditor must name one of them."""

    places: list[tuple[int, int | None]] = field(default_factory=list)  # (request, page)

    def add(self, uid: int, page: int | None = None) -> None:
        """Record an affected request, and page if there is one."""
        self.places.append((uid, page))


# ---- five bugs -------------------------------------------------------------------------------------------


@contextmanager
def leak(damage: Damage) -> Iterator[None]:
    """Plant a bug: a request that ends or is retracted never retires its last page."""
    real = CacheManager._retire

    def retire(self: CacheManager, owned: Owned, rows: Any = None) -> None:
        if rows is not None:
            for uid, pages in owned:
                if len(pages):
                    damage.add(uid, int(pages[-1]))
            owned = [(uid, pages[:-1]) for uid, pages in owned]
        real(self, owned, rows)

    with patch.object(CacheManager, "_retire", retire):
        yield


@contextmanager
def double_free(damage: Damage, late: bool = False) -> Iterator[None]:
    """Plant a bug: a request that ends or is retracted retires its last page twice.

    The second time is at once, or, with ``late``, when another request owns the page.
    """
    real, real_updates = CacheManager._retire, CacheManager.pop_page_table_updates
    retired: dict[int, int] = {}  # page -> uid of the request that retired it

    def retire(self: CacheManager, owned: Owned, rows: Any = None) -> None:
        real(self, owned, rows)
        for uid, pages in owned if rows is not None else ():
            if len(pages):
                retired[int(pages[-1])] = uid
                if not late:
                    damage.add(uid, int(pages[-1]))
                    real(self, [(uid, pages[-1:])])

    def pop_page_table_updates(self: CacheManager) -> Any:
        updates = real_updates(self)
        for page, uid in retired.items():
            if self.allocator.owner[page] >= 0:
                damage.add(uid, page)
                real(self, [(uid, np.array([page], np.int32))])
        return updates

    with (
        patch.object(CacheManager, "_retire", retire),
        patch.object(CacheManager, "pop_page_table_updates", pop_page_table_updates),
    ):
        yield


@contextmanager
def early_free(damage: Damage) -> Iterator[None]:
    """Plant a bug: pages are free at once when they are retired, although a launched step still writes to them."""
    real_allocate = PageAllocator.allocate
    until: dict[int, int] = {}  # retired page -> the last step that may write to it

    def retire(self: PageAllocator, pages: Any, owner: Any, after: int) -> None:
        OwnerTable.retire(self, pages, owner, self.last_read_step)
        until.update(dict.fromkeys(pages.tolist(), after))

    def allocate(self: PageAllocator, n: int, owner: Any) -> Any:
        pages = real_allocate(self, n, owner)
        owners = np.broadcast_to(np.asarray(owner), n)
        for uid, page in zip(owners.tolist(), pages.tolist(), strict=True):
            if until.pop(page, -1) > self.last_read_step:
                damage.add(uid, page)
        return pages

    with patch.object(PageAllocator, "retire", retire), patch.object(PageAllocator, "allocate", allocate):
        yield


@contextmanager
def stale_page_table(damage: Damage) -> Iterator[None]:
    """Plant a bug: duplicate pages of a cached prefix are retired, and the request's page table still names them."""
    real_replace, real_build = PrefixCacheManager._replace_duplicates, Scheduler._build
    stale: dict[int, set[int]] = {}  # uid -> retired pages that its page table names

    def replace(self: PrefixCacheManager, req: Req, *inserted: Any) -> None:
        writes, row = list(self._page_table_updates), self.request_table.page_table[req.req_pool_idx].copy()
        real_replace(self, req, *inserted)
        changed = row[self.request_table.page_table[req.req_pool_idx] != row]
        if len(changed):
            stale[req.uid] = set(changed.tolist())
        self._page_table_updates, self.request_table.page_table[req.req_pool_idx] = writes, row

    def build(self: Scheduler, rows: Any) -> Any:
        step, reqs = real_build(self, rows)
        owner = self.cache_manager.allocator.owner
        for req in reqs:
            for page in stale.get(req.uid, ()):
                # Allocated to this request again, or cached, by chance: then the row reads no other request's KV.
                if owner[page] not in (req.uid, CACHE):
                    damage.add(req.uid, page)
        return step, reqs

    with patch.object(PrefixCacheManager, "_replace_duplicates", replace), patch.object(Scheduler, "_build", build):
        yield


@contextmanager
def two_replies(damage: Damage) -> Iterator[None]:
    """Plant a bug: an aborted request gets two final replies."""
    real = Scheduler.abort_request

    def abort_request(self: Scheduler, uid: int) -> None:
        req = self.requests.get(uid)
        real(self, uid)
        if req is not None:
            damage.add(uid)
            self.events.request_finished(req, self.clock())

    with patch.object(Scheduler, "abort_request", abort_request):
        yield


BUGS: dict[str, Callable[..., Any]] = {
    "leak": leak,
    "twice": double_free,
    "in-flight": early_free,
    "table": stale_page_table,
    "reply": two_replies,
}
"""Name of a bug → context manager that plants it."""


# ---- runs ------------------------------------------------------------------------------------------------


class EngineDied(Exception):  # noqa: N818 - an event of the workload, not an error of the gate
    """The engine died in this run, as the workload asked."""


def _client(number: int, own: int, answer: int, **more: int) -> dict[str, int]:
    return {"id": number, "stem": 0, "shared": 0, "own": own, "answer": answer, "arrive": 0, **more}


def _few(*jobs: dict[str, int], **more: Any) -> dict[str, Any]:
    plain = {"page_size": 4, "pages": 30, "slots": 4, "chunk": 8192, "policy": "hasty", "cache": "radix", "overlap": 1}
    return {**plain, "tight": 1, "dies": 0, "late": 0, "jobs": list(jobs), **more}


HEALTHY: Sequence[Callable[[], dict[str, Any]]] = (
    lambda: _few(_client(1, 3, 2)),
    lambda: _few(_client(1, 5, 3, shared=8), _client(2, 5, 3, shared=8, arrive=2)),  # two requests read the same pages
    lambda: _few(_client(1, 9, 20), _client(2, 9, 20), pages=9, cache="naive"),  # one request is retracted
    lambda: _few(
        _client(1, 9, 6), _client(2, 9, 6, arrive=8), _client(3, 9, 6, arrive=16), pages=6
    ),  # pages are evicted from the cache
    lambda: _few(_client(1, 9, 8, abort=4), _client(2, 9, 8, abort=0), _client(3, 9, 8, abort=2), slots=1),
    lambda: _few(_client(1, 12, 9, shared=8), _client(2, 12, 9, shared=8)),  # the common prefix is computed twice
    lambda: _few(_client(1, 9, 9), _client(2, 9, 9), dies=3),
)
"""Workloads without a bug, each with one event that an auditor might report by mistake."""

TRIGGERS: dict[str, Callable[[], dict[str, Any]]] = {
    "leak": lambda: _few(_client(0, 9, 3)),  # 0 is a uid like any other
    "twice": lambda: _few(_client(1, 9, 3)),
    "in-flight": lambda: _few(
        _client(1, 9, 12, abort=3), _client(2, 9, 12, arrive=1), _client(3, 13, 6, arrive=2), pages=8, cache="naive"
    ),
    "table": lambda: _few(_client(1, 4, 16, shared=12), _client(2, 4, 16, shared=12)),
    "reply": lambda: _few(_client(1, 9, 12, abort=3), _client(2, 9, 12)),
}
"""Name of a bug → a small workload in which the bug does damage."""


def late_workload() -> dict[str, Any]:
    """Return a workload in which a page is retired a second time when another request owns it."""
    return _few(_client(1, 9, 3), _client(2, 9, 3, arrive=6), pages=4, slots=1, cache="naive", late=1)


def make_auditor(student: Student, ready: set[str] | None, alone: bool) -> tuple[Any, PluginManager]:
    """Return a new auditor, and the plugin manager that calls its hooks.

    ``ready``: the hooks that must be written (None: all). ``alone``: the other hooks are not called.
    """
    auditor, manager = observer(student, "findings", ready)
    if alone and ready is not None:
        silence_others(manager, ready)
    return auditor, manager


class Audit:
    """One run with the student's auditor as observer. ``ready`` and ``alone``: see `make_auditor`."""

    def __init__(self, student: Student, workload: dict[str, Any], ready: set[str] | None, alone: bool):
        self.auditor, manager = make_auditor(student, ready, alone)
        policy = workload["policy"]
        self.drive: WatchedDrive = watch({**workload, "policy": "mixed" if policy == "hasty" else policy}, manager)
        if policy == "hasty":
            guard: Any = self.drive.scheduler.planner.policy
            guard.policy = ArrivalOrderPolicy()
        self.workload, self.damage = workload, Damage()
        self.looked = 0  # number of findings whose step was checked
        self.evicted: set[int] = set()  # pages
        self.retracted: set[int] = set()  # uids of requests
        self.uncleared: dict[int, dict[int, int]] = {}  # the page table, if no admission emptied a row
        self.owners: Any = None  # of all pages, at the last launch
        self.rows: dict[int, tuple[int, Any]] = {}  # uid of a row of the last step -> request-pool row, pages in it
        self.drive.look = self.look
        events: Any = self.drive.scheduler.events
        evicted, retracted, scheduled = events.pages_evicted, events.request_retracted, events.batch_scheduled

        def batch_scheduled(step: Any, reqs: Any, now: float) -> None:
            for row, column, page in zip(*(part.tolist() for part in step.page_table_updates), strict=True):
                self.uncleared.setdefault(row, {})[column] = page
            manager = self.drive.scheduler.cache_manager
            self.owners = manager.allocator.owner.copy()
            self.rows = {req.uid: (req.req_pool_idx, manager.request_table.pages_of(req)) for req in reqs}
            scheduled(step, reqs, now)

        def pages_evicted(step: int, pages: Any) -> None:
            self.evicted.update(pages.tolist())
            evicted(step, pages)

        def request_retracted(req: Req, step: int) -> None:
            self.retracted.add(req.uid)
            retracted(req, step)

        events.pages_evicted, events.request_retracted = pages_evicted, request_retracted
        events.batch_scheduled = batch_scheduled

    @property
    def findings(self) -> list[Any]:
        """A copy of the auditor's findings so far."""
        return list(self.auditor.findings)

    def look(self, output: Output | None) -> None:
        """Check after each step that the auditor is silent as long as no bug has done damage."""
        if not self.damage.places and self.findings:
            raise self.false_alarm(self.findings[0])
        launched = self.drive.scheduler.next_step_id - 1
        for finding in self.findings[self.looked :]:
            if finding.step not in (launched - 1, launched):
                seen = f"Step {launched} was launched last, and the finding says step {finding.step}."
                raise Broken("last-step", "A finding names the last launched step.", seen, step=launched)
        self.looked = len(self.findings)
        if self.workload["dies"] and self.drive.report.steps >= self.workload["dies"]:
            self.drive.fail("the device is gone")
            if self.findings:
                raise self.false_alarm(self.findings[0], "engine-died")
            raise EngineDied

    def false_alarm(self, finding: Any, cause: str = "") -> Broken:
        """Return the verdict for a finding on a healthy run, with the cause that fits its page or request."""
        page, uid = getattr(finding, "page", None), getattr(finding, "uid", None)
        owner, table = self.state_of(finding)
        aborted = {job["id"] for job in self.workload["jobs"] if "abort" in job}
        cause = cause or alarm_cause(finding, owner, table, self.evicted, self.retracted, False)
        if cause == "false-alarm" and uid in aborted and getattr(finding, "rule", "") in ("reply", "leak"):
            cause = "hang-up"
        seen = f"The run was healthy, and the auditor reported: {getattr(finding, 'text', finding)!s:.160}"
        return Broken(
            cause,
            "The auditor reports nothing over a healthy run.",
            seen,
            step=self.drive.scheduler.next_step_id - 1,
            request=uid,
            page=page,
        )

    def state_of(self, finding: Any) -> tuple[int | None, set[int] | None]:
        """Return the true owner of a finding's page, and the pages in the row of its request (None: it has no row).

        The row is that of the last launched step. A finding of the rule ``table`` is about this launch; pages may have
        changed their owners since.
        """
        page: Any = getattr(finding, "page", None)
        uid: Any = getattr(finding, "uid", None)
        owners = self.drive.scheduler.cache_manager.allocator.owner
        if getattr(finding, "rule", "") == "table" and self.owners is not None:
            owners = self.owners
        owner = int(owners[page]) if page is not None and 0 <= page < len(owners) else None
        if uid not in self.rows:
            return owner, None
        row, pages = self.rows[uid]
        if list(self.uncleared.get(row, {}).values()).count(page) > 1:
            return owner, set()  # the auditor sees the page twice: the rest of an earlier request's row is one of them
        return owner, set(pages.tolist())

    def named(self) -> bool:
        """Return whether a finding has the right rule, request and page of a place that the bug affected."""
        rule, places = _RULE[self.workload["bug"]], set(self.damage.places)
        return any(finding.rule == rule and (finding.uid, finding.page) in places for finding in self.findings)


def audit(student: Student, workload: dict[str, Any], ready: set[str] | None = None, alone: bool = False) -> Audit:
    """Run the workload with its bug and check the auditor's findings.

    Raise `Broken` for a false alarm or a missed bug, and `Invalid` if the bug does no damage in this workload.
    """
    bug = workload["bug"]
    if bug and workload["dies"]:
        raise Invalid
    done = Audit(student, workload, ready, alone)
    with ExitStack() as stack:
        stack.enter_context(no_lookahead() if workload["tight"] else nullcontext())
        late = {"late": True} if bug == "twice" and workload["late"] else {}
        stack.enter_context(BUGS[bug](done.damage, **late) if bug else nullcontext())
        try:
            run(done.drive, workload)
        except EngineDied:
            return done
        except AssertionError:  # after the bug has done damage, the scheduler's own checks may fail too
            if not bug:
                raise
        except (ValueError, IndexError, KeyError):  # the scheduler's state is inconsistent after the damage
            if not done.damage.places:
                raise
    if not bug:
        if done.findings:
            raise done.false_alarm(done.findings[0])
        return done
    if not done.damage.places:
        raise Invalid
    if not done.named():
        uid, page = done.damage.places[0]
        seen = f"The planted bug: {_SAYS[bug]} It affected request {uid}{'' if page is None else f' and page {page}'}; "
        if done.findings:
            first = done.findings[0]
            says = f"rule {first.rule!r}, request {first.uid}, page {first.page}"
            seen += f"the auditor reported {says}; the rule is {_RULE[bug]!r}."
            promise = "A finding names the broken rule, the affected request, and the affected page if there is one."
            raise Broken("place", promise, seen, request=uid, page=page)
        seen += "the auditor reported nothing."
        raise Broken(f"misses-{bug}", "The auditor finds every planted bug.", seen, request=uid, page=page)
    return done


_RULE = {"leak": "leak", "twice": "owner", "in-flight": "in-flight", "table": "table", "reply": "reply"}
"""Name of a bug → the rule that it breaks."""

_SAYS = {
    "leak": "a request ended and its last page was never retired.",
    "twice": "a request retired a page twice.",
    "in-flight": "a page was allocated again while a launched step could still write to it.",
    "table": "a page was retired, and a request's page table still names it.",
    "reply": "a request got two final replies.",
}


# ---- histories of hook calls -------------------------------------------------------------------------------


def run_history(student: Student, workload: dict[str, Any], ready: set[str] | None, alone: bool = False) -> None:
    """Compare the findings of one auditor, or of two that know nothing of each other, after each hook call."""
    try:
        play_history(student, workload, ready, alone)
    except Broken as wrong:
        if workload["auditors"] > 1:
            try:
                play_history(student, {**workload, "auditors": 1}, ready, alone)
            except Exception:
                raise wrong from None
            seen = f"The same hook calls were right for an auditor alone. {wrong.seen}"
            raise Broken("one-for-all", "Each server has its own auditor.", seen) from wrong
        if only_small_numbers(student, PROBES.get(wrong.cause), ready, alone):
            wrong.cause, wrong.seen = "numbers", f"{wrong.seen} It reports such an error of request 0."
        raise


PROBES: dict[str, list[list[Any]]] = {
    "misses-leak": [["add", 0], ["allocate", [0], [3]], ["finish", 0, 0]],
    "misses-owner": [["add", 0], ["add", 1], ["allocate", [0, 1], [3, 4]], ["retire", 0, [4]]],
}
"""Cause → the shortest history with this error."""


def only_small_numbers(student: Student, events: list[list[Any]] | None, ready: set[str] | None, alone: bool) -> bool:
    """Return whether a short history is right if its requests have small numbers, but not if they have large ones."""

    def is_right(first: int) -> bool:
        probe = {"events": events, "first": first, "shift": 0, "auditors": 1}
        try:
            play_history(student, probe, ready, alone)
        except Exception:
            return False
        return True

    return events is not None and is_right(0) and not is_right(100_000)


def play_history(student: Student, workload: dict[str, Any], ready: set[str] | None, alone: bool) -> None:
    """Apply the events to each auditor. The second auditor is three events behind, and its requests are others."""
    stages = []
    for i in range(workload["auditors"]):
        auditor, manager = make_auditor(student, ready, alone)
        stages.append(Stage(auditor, Rules(manager.hook, workload["first"] + 7 * i, workload["shift"])))
    events = workload["events"]
    for number in range(len(events) + 3 * (len(stages) - 1)):
        for i, stage in enumerate(stages):
            at = number - 3 * i
            if 0 <= at < len(events):
                try:
                    stage.apply(events[at], check_open=ready is None)
                except Broken as wrong:
                    wrong.show = show_history({**workload, "events": events[: max(at, number) + 1]})
                    raise


class Stage:
    """One auditor, and the rules that say what it must report."""

    def __init__(self, auditor: Any, rules: Rules):
        self.auditor, self.rules = auditor, rules
        self.counted = 0  # findings so far
        self.evicted: set[int] = set()
        self.retracted: set[int] = set()
        self.told: set[int] = set()  # pages that right findings were about

    def apply(self, event: list[Any], check_open: bool) -> None:
        """Apply one event. Raise `Broken` if the auditor reports something else than it must."""
        missed = list(self.rules.apply(event))
        if event[0] == "evict":
            self.evicted.update(page + self.rules.shift for page in event[1])
        elif event[0] == "retract":
            self.retracted.add(event[1] + self.rules.first)
        findings = list(self.auditor.findings)[self.counted :]
        self.counted += len(findings)
        extra, right = [], []
        for finding in findings:
            same = next((each for each in missed if each.allows(finding)), None)
            if same is None:
                extra.append(finding)
            else:
                missed.remove(same)
                right.append((finding, same))
        earlier = set(self.told)
        self.told.update(finding.page for finding, _ in right if finding.page is not None)
        if missed or extra:
            raise self.wrong(event, missed, extra, [finding for finding, _ in right], earlier)
        for finding, same in right:
            if finding.step not in same.steps:
                last = f"step {same.steps[-1]} was launched last"
                seen = f"{self.said(event)} The finding says step {finding.step}; {last}."
                raise Broken("last-step", "A finding names the last launched step.", seen, step=same.steps[-1])
        if self.rules.changed:
            promise = "An observer reads the arguments of its hooks, and changes none."
            raise Broken("changes", promise, f"{self.said(event)} The auditor changed `{self.rules.changed}`.")
        opened = sorted(uid + self.rules.first for uid in self.rules.open)
        if check_open and hasattr(self.auditor, "open") and sorted(self.auditor.open) != opened:
            seen = f"{self.said(event)} `open` is {sorted(self.auditor.open)[:6]}, and should be {opened[:6]}."
            raise Broken("open", "`open` holds the uids of the requests without a final reply.", seen)

    def said(self, event: list[Any]) -> str:
        """Describe the event in a sentence."""
        shown = show_history({"events": [event], "first": self.rules.first, "shift": self.rules.shift, "auditors": 1})
        if event[0] in ("launch", "read"):
            number = self.rules.launched if event[0] == "launch" else self.rules.read_step
            shown = f"step {number} is {'launched' if event[0] == 'launch' else 'read'}"
        return f"The last event: {shown:.200}."

    def wrong(
        self, event: list[Any], missed: list[Expected], extra: list[Any], right: list[Any], told: set[int]
    ) -> Broken:
        """Return the verdict for findings that are missing or too many. ``told``: pages of earlier right findings."""
        where: dict[str, Any] = {}
        if missed:
            first = missed[0]
            page = "" if first.page is None else f", page {first.page}"
            who = "None or -1 (the cache)" if first.uid is None else first.uid
            must = f"rule {first.rule!r}, request {who}{page}"
            where = {"request": first.uid, "page": first.page, "step": first.steps[-1]}
            if extra:
                seen = f"{self.said(event)} The auditor must report {must}; it reported {_shown(extra[0])}."
                promise = "A finding names the broken rule, the affected request and, if there is one, the page."
                return Broken("place", promise, seen, **where)
            also = f", in addition to {_shown(right[0])}" if right else ""
            only = "nothing else" if also else "nothing"
            seen = f"{self.said(event)} The auditor must report {must}{also}; it reported {only}."
            return Broken(f"misses-{first.rule}", "The auditor finds every broken rule.", seen, **where)
        finding = extra[0]
        before = list(self.auditor.findings)[: self.counted - len(extra) - len(right)]
        before = [each for each in before if each.rule == "leak"]  # the other rules may be broken once in each event
        where = {"request": finding.uid, "page": finding.page, "step": self.rules.launched}
        if any(
            (f.rule, f.uid, f.page) == (finding.rule, finding.uid, finding.page) for f in (*before, *right, *extra[1:])
        ):
            seen = f"{self.said(event)} The auditor reported twice: {_shown(finding)}."
            return Broken("again", "Each error is reported once.", seen, **where)
        table = self.rules.table_of(finding.uid)
        if finding.rule == "table" and self.rules.twice_if_uncleared(finding.uid, finding.page):
            table = set()  # the auditor sees the page twice: the rest of an earlier request's row is one of them
        failed = event[0] == "finish" and event[2] == FAILED
        owner = self.rules.owner_of(finding.page)
        cause = alarm_cause(finding, owner, table, self.evicted, self.retracted, failed)
        if finding.page in told and cause in ("false-alarm", "owners", "shared", "retraction"):
            cause = "after-finding"
        seen = f"{self.said(event)} No rule is broken; the auditor reported {_shown(finding)}: {finding.text!s:.100}"
        return Broken(cause, "The auditor reports no error where there is none.", seen, **where)


def alarm_cause(
    finding: Any, owner: int | None, table: set[int] | None, evicted: set[int], retracted: set[int], failed: bool
) -> str:
    """Return the cause of a false alarm.

    ``owner`` is the true owner of the finding's page, and ``table`` the pages in the request's row of the page table
    (None: it has no row). ``failed``: the engine has just failed.
    """
    rule, uid, page = (getattr(finding, name, None) for name in ("rule", "uid", "page"))
    if rule == "leak" and failed:
        return "engine-died"
    if rule == "in-flight":
        return "evicted" if page in evicted else "unread"
    if rule == "table" and table is not None and page not in table:
        return "stale-row"
    if page is not None and owner == CACHE:
        return "shared"
    if rule in ("reply", "leak") and uid in retracted:
        return "retraction"
    if rule in ("table", "owner") and owner is not None and owner == uid:
        return "owners"
    return "false-alarm"


def _shown(finding: Any) -> str:
    page = "" if finding.page is None else f", page {finding.page}"
    return f"rule {finding.rule!r}, request {finding.uid}{page}"


def draw(workload: dict[str, Any]) -> str:
    """Describe the workload: its options, its planted bug, and its requests; or the events of a history."""
    if "events" in workload:
        return show_history(workload)
    bug = f", planted bug: {workload['bug']}" if workload["bug"] else ""
    dies = f", the engine dies in step {workload['dies']}" if workload["dies"] else ""
    how = f"cache {workload['cache']}, overlap {'on' if workload['overlap'] else 'off'}{dies}{bug}"
    return how + "\n" + show(workload)


def any_run(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a random workload without a bug: with aborts, few pages, and in some runs an engine that dies."""
    workload = random_workload(rng, size)
    for job in workload["jobs"]:
        if rng.random() < 0.2:
            job["abort"] = rng.randint(0, 12)
    more = {"policy": rng.choice(["hasty", "mixed", "prefill_first"]), "cache": rng.choice(["naive", "radix"])}
    dies = rng.randint(1, 8) if rng.random() < 0.1 else 0
    return {
        **workload,
        **more,
        "overlap": rng.randint(0, 1),
        "tight": rng.randint(0, 1),
        "dies": dies,
        "bug": "",
        "late": rng.randint(0, 1),
    }


def gate_of(part: str, says: str, bugs: Sequence[str], ready: set[str] | None) -> Gate:
    """Return the gate of one part: its ``bugs`` are found, and nothing is reported without them."""
    fixed = [{**TRIGGERS[bug](), "bug": bug} for bug in bugs]
    fixed += [{**run(), "bug": ""} for run in HEALTHY]
    fixed += [{**late_workload(), "bug": "twice"}] * ("twice" in bugs)
    special = special_histories(part)
    first = len(fixed) + 2 + len(special) + 1  # the number of workloads before the random ones

    def make(rng: random.Random, size: int) -> dict[str, Any]:
        if size <= len(fixed):
            return fixed[size - 1]
        if size <= len(fixed) + 2:
            return all_changes(rng, part)
        if size <= len(fixed) + 2 + len(special):
            return special[size - len(fixed) - 3]
        if size == first:
            return large_history(part)
        if size % 4:
            return make_history(rng, size, part)
        bug = rng.choice(["", *bugs])
        workload = any_run(rng, size)
        return {**workload, "bug": bug, "dies": 0 if bug else workload["dies"]}

    def searched(alone: bool) -> Callable[[Student], str]:
        def check(student: Student, workload: dict[str, Any]) -> None:
            play: Callable[..., Any] = run_history if "events" in workload else audit
            play(student, workload, ready, alone)

        return search(make, check, tries=400, seconds=SECONDS, at_least=first + RANDOM, show=draw)

    def run_gate(student: Student) -> str:
        """Search with all hooks. If that fails, search without the hooks of later parts: one of them may be wrong."""
        try:
            return searched(alone=False)(student)
        except Exception as wrong:
            if ready is None or student.replay is not None:
                raise
            try:
                return searched(alone=True)(student)
            except Exception:
                raise wrong from None

    return Gate(part, says, run_gate, part=f"ledger.{part}")


def silent(student: Student) -> str:
    """Check that the auditor reports nothing over healthy runs of every kind."""
    seen = {"runs": 0, "aborts": 0, "retractions": 0, "shared pages": 0}

    def make(rng: random.Random, size: int) -> dict[str, Any]:
        return {**HEALTHY[size - 1](), "bug": ""} if size <= len(HEALTHY) else any_run(rng, size)

    def check(student: Student, workload: dict[str, Any]) -> None:
        done = audit(student, workload)
        seen["runs"] += 1
        seen["aborts"] += sum("abort" in job for job in workload["jobs"])
        seen["retractions"] += len(done.retracted)
        seen["shared pages"] += done.drive.report.cached_tokens // workload["page_size"]

    search(make, check, seconds=SECONDS, show=draw)(student)
    return f"0 false alarms in {seen['runs']} runs: " + ", ".join(f"{n} {what}" for what, n in [*seen.items()][1:])


def five(student: Student) -> str:
    """Check that the auditor finds each bug, first in its own workload and then in random ones."""

    def make(rng: random.Random, size: int) -> dict[str, Any]:
        bug = list(BUGS)[(size - 1) % len(BUGS)]
        return {**(TRIGGERS[bug]() if size <= len(BUGS) else any_run(rng, size)), "dies": 0, "bug": bug}

    found: set[str] = set()

    def check(student: Student, workload: dict[str, Any]) -> None:
        audit(student, workload)
        found.add(workload["bug"])

    search(make, check, seconds=SECONDS, at_least=len(BUGS), show=draw)(student)
    assert student.replay is not None or len(found) == len(BUGS), f"only the bugs {found} did damage"
    return f"{len(found)} of {len(BUGS)} planted bugs found"


def metrics(served: Served) -> str:
    """Check that /metrics of the real server, which has served aborted requests too, shows 0 findings."""
    assert served.server is not None
    found = {k: v for k, v in served.server.metrics().items() if k.startswith("minisgl_audit_")}
    alarms = sum(value for name, value in found.items() if name.startswith("minisgl_audit_findings_total"))
    if not found or alarms:
        seen = f"/metrics shows {alarms:.0f} findings." if found else "/metrics has no sample `minisgl_audit_…`."
        raise Broken("false-alarm", "The auditor reports nothing over a healthy run, and /metrics shows it.", seen)
    cached = found.get('minisgl_audit_pages{owner="cache"}', 0.0)
    return f"/metrics: 0 findings, {cached:.0f} pages owned by the cache"


GATES = (
    gate_of("pages", "a page has one owner, and only its owner retires it", ["twice"], PAGES),
    gate_of("steps", "pages that launched steps may still touch are not reused", ["in-flight", "table"], PAGES | STEPS),
    gate_of("requests", "each request gets one final reply and owns no page after its end", ["leak", "reply"], None),
    Gate("silent", "the auditor reports no error in healthy runs", silent),
    Gate("five", "each of the five planted bugs is found", five),
    facts(["minisgl_pages_allocated", "minisgl_batch_scheduled", "minisgl_request_finished"]),
    Gate("metrics", "/metrics shows the auditor's findings", metrics, served=True),
)


MOST_LINES = 25
"""The number to beat. Arrays, and a loop over the requests of a step, take 45."""


def measure_stretch(student: Student) -> tuple[str, bool]:
    """Count the lines that the student's auditor executes in a decode step."""
    lines, right = lines_of_a_decode_step(student)
    counted = f"{lines:,} lines" + ("" if right else ", but its findings are wrong")
    return counted, right and lines <= MOST_LINES


STRETCH = Stretch(
    f"In 32 decode steps of {REQUESTS} requests with 2,000 tokens each, Python executes 4,110 lines of `auditor` per "
    "step on average. In two of these steps, each request gets a page. Find the same errors with at most "
    f"{MOST_LINES} lines per step.",
    measure_stretch,
)
