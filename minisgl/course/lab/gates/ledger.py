"""Lab `ledger`: the auditor is shown healthy runs, over which it must be silent, and runs with a bug planted into the
real scheduler. Each bug notes where it strikes; the auditor must have named that page, or that request.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np

from minisgl.core import Output, Req
from minisgl.course.lab.grader.gate import Broken, Gate, Invalid, Student
from minisgl.course.lab.grader.observed import WatchedDrive, observer, run, watch
from minisgl.course.lab.grader.search import search
from minisgl.course.lab.grader.server_gate import Served, facts
from minisgl.course.lab.grader.simulated_workloads import random_workload, show
from minisgl.scheduler.cache_manager import CacheManager
from minisgl.scheduler.page_allocator import CACHE, PageAllocator
from minisgl.scheduler.scheduler import Scheduler
from minisgl.testing.planted import Hasty
from minisgl.testing.small import tight

PAGES = {f"minisgl_pages_{what}" for what in ("allocated", "cached", "evicted", "freed")}
STEPS = {"minisgl_batch_scheduled", "minisgl_step_finished"}
SECONDS = 0.5
"""Of random runs, a gate. What each gate is for comes first, whatever that takes."""


@dataclass
class Struck:
    """Where a bug did harm: requests and pages of which the auditor must have named one."""

    places: list[tuple[int, int | None]] = field(default_factory=list)  # (request, page)

    def add(self, uid: int, page: int | None = None) -> None:
        self.places.append((uid, page))


# ---- five bugs -------------------------------------------------------------------------------------------


@contextmanager
def leak(struck: Struck) -> Iterator[None]:
    """The last page of a request that leaves its slot is forgotten."""
    real = CacheManager._retire

    def give(self: CacheManager, uid: int, pages: Any, slots: Any = None) -> None:
        if slots is not None and len(pages):
            struck.add(uid, int(pages[-1]))
            pages = pages[:-1]
        real(self, uid, pages, slots)

    with patch.object(CacheManager, "_give", give):
        yield


@contextmanager
def twice(struck: Struck, late: bool = False) -> Iterator[None]:
    """A request that leaves gives its last page back a second time: at once, or when another request has it."""
    real, real_writes = CacheManager._retire, CacheManager.pop_page_table_updates
    again: dict[int, int] = {}  # page -> who gave it back

    def give(self: CacheManager, uid: int, pages: Any, slots: Any = None) -> None:
        real(self, uid, pages, slots)
        if slots is not None and len(pages):
            again[int(pages[-1])] = uid
            if not late:
                struck.add(uid, int(pages[-1]))
                real(self, uid, pages[-1:])

    def table_writes(self: CacheManager) -> Any:
        writes = real_writes(self)
        for page, uid in again.items():
            if self.allocator.pages.owner[page] >= 0:
                struck.add(uid, page)
                real(self, uid, np.array([page], np.int32))
        return writes

    with patch.object(CacheManager, "_give", give), patch.object(CacheManager, "table_writes", table_writes):
        yield


@contextmanager
def hasty(struck: Struck) -> Iterator[None]:
    """Pages are free when they are given back, although a launched step still writes to them."""
    real_give, real_take = PageAllocator.retire, PageAllocator.allocate
    until: dict[int, int] = {}

    def give(self: PageAllocator, pages: Any, owner: int, after: int, slots: Any = None) -> None:
        if slots is not None:
            real_give(self, pages[:0], owner, after, slots)
        self.pages.retire(pages, owner)
        self.pages.free_retired(pages)
        until.update(dict.fromkeys(pages.tolist(), after))

    def take(self: PageAllocator, n: int, owner: Any) -> Any:
        pages = real_take(self, n, owner)
        owners = np.broadcast_to(np.asarray(owner), n)
        for uid, page in zip(owners.tolist(), pages.tolist(), strict=True):
            if until.pop(page, -1) > self._last_read_step:
                struck.add(uid, page)
        return pages

    with patch.object(PageAllocator, "give", give), patch.object(PageAllocator, "take", take):
        yield


@contextmanager
def unmapped(struck: Struck) -> Iterator[None]:
    """Pages that were computed twice are given back, and the page table still names them."""
    real_insert, real_build = CacheManager._insert, Scheduler._build
    stale: dict[int, set[int]] = {}

    def insert(self: CacheManager, req: Req, ids: Any, whole: int) -> None:
        writes, row = list(self._page_table_updates), self.request_table.page_table[req.req_pool_idx].copy()
        real_insert(self, req, ids, whole)
        changed = row[self.request_table.page_table[req.req_pool_idx] != row]
        if len(changed):
            stale[req.uid] = set(changed.tolist())
        self._page_table_updates, self.request_table.page_table[req.req_pool_idx] = writes, row

    def build(self: Scheduler, rows: Any) -> Any:
        step, reqs = real_build(self, rows)
        owner = self.cache_manager.allocator.pages.owner
        for req in reqs:
            for page in stale.get(req.uid, ()):
                if owner[page] not in (req.uid, CACHE):  # else it has it again, by chance: nobody else's KV is there
                    struck.add(req.uid, page)
        return step, reqs

    with patch.object(CacheManager, "_insert", insert), patch.object(Scheduler, "_build", build):
        yield


@contextmanager
def answered(struck: Struck) -> Iterator[None]:
    """A hang-up is answered twice: by who hears of it, and by who ends the request."""
    real = Scheduler.abort_request

    def abort(self: Scheduler, uid: int) -> None:
        req = self.requests.get(uid)
        real(self, uid)
        if req is not None:
            struck.add(uid)
            self.events.request_finished(req, self.clock())

    with patch.object(Scheduler, "abort", abort):
        yield


BUGS: dict[str, Callable[..., Any]] = {
    "leak": leak,
    "twice": twice,
    "in-flight": hasty,
    "table": unmapped,
    "reply": answered,
}


# ---- runs ------------------------------------------------------------------------------------------------


class Dead(Exception):  # noqa: N818 - what happened, not an error of the gate
    """The engine died in this run, as the workload said."""


def _client(number: int, own: int, answer: int, **more: int) -> dict[str, int]:
    return {"id": number, "stem": 0, "shared": 0, "own": own, "answer": answer, "arrive": 0, **more}


def _few(*jobs: dict[str, int], **more: Any) -> dict[str, Any]:
    plain = {"page_size": 4, "pages": 30, "slots": 4, "chunk": 8192, "policy": "hasty", "cache": "radix", "overlap": 1}
    return {**plain, "tight": 1, "dies": 0, "late": 0, "jobs": list(jobs), **more}


HEALTHY: Sequence[Callable[[], dict[str, Any]]] = (
    lambda: _few(_client(1, 3, 2)),
    lambda: _few(_client(1, 5, 3, shared=8), _client(2, 5, 3, shared=8, arrive=2)),  # two read the same pages
    lambda: _few(_client(1, 9, 20), _client(2, 9, 20), pages=9, cache="naive"),  # one makes way
    lambda: _few(_client(1, 9, 6), _client(2, 9, 6, arrive=8), _client(3, 9, 6, arrive=16), pages=6),  # evictions
    lambda: _few(_client(1, 9, 8, abort=4), _client(2, 9, 8, abort=0), _client(3, 9, 8, abort=2), slots=1),
    lambda: _few(_client(1, 12, 9, shared=8), _client(2, 12, 9, shared=8)),  # the same pages are computed twice
    lambda: _few(_client(1, 9, 9), _client(2, 9, 9), dies=3),
)
"""What is no bug, one thing at a time."""

STRUCK: dict[str, Callable[[], dict[str, Any]]] = {
    "leak": lambda: _few(_client(1, 9, 3)),
    "twice": lambda: _few(_client(1, 9, 3)),
    "in-flight": lambda: _few(
        _client(1, 9, 12, abort=3), _client(2, 9, 12, arrive=1), _client(3, 13, 6, arrive=2), pages=8, cache="naive"
    ),
    "table": lambda: _few(_client(1, 4, 16, shared=12), _client(2, 4, 16, shared=12)),
    "reply": lambda: _few(_client(1, 9, 12, abort=3), _client(2, 9, 12)),
}
"""A small workload on which each bug strikes."""


def late_workload() -> dict[str, Any]:
    """One on which a page is given back a second time when another request has it."""
    return _few(_client(1, 9, 3), _client(2, 9, 3, arrive=6), pages=4, slots=1, cache="naive", late=1)


class Audit:
    """One run with the student's auditor listening."""

    def __init__(self, student: Student, workload: dict[str, Any], ready: set[str] | None):
        self.auditor, host = observer(student, "findings", ready)
        policy = workload["policy"]
        self.drive: WatchedDrive = watch({**workload, "policy": "mixed" if policy == "hasty" else policy}, host)
        if policy == "hasty":
            self.drive.scheduler.planner.policy = Hasty()
        self.workload, self.struck = workload, Struck()
        self.gone: set[int] = set()  # pages that were evicted
        self.made_way: set[int] = set()
        self.drive.look = self.look
        events: Any = self.drive.scheduler.events
        evicted, retracted = events.pages_evicted, events.request_retracted

        def pages_evicted(step: int, pages: Any) -> None:
            self.gone.update(pages.tolist())
            evicted(step, pages)

        def request_retracted(req: Req, step: int) -> None:
            self.made_way.add(req.uid)
            retracted(req, step)

        events.pages_evicted, events.request_retracted = pages_evicted, request_retracted

    @property
    def findings(self) -> list[Any]:
        return list(self.auditor.findings)

    def look(self, output: Output | None) -> None:
        """After each turn: silent as long as nothing is wrong."""
        if not self.struck.places and self.findings:
            raise self.false_alarm(self.findings[0])
        if self.workload["dies"] and self.drive.report.steps >= self.workload["dies"]:
            self.drive.fail("the device is gone")
            if self.findings:
                raise self.false_alarm(self.findings[0], "engine-died")
            raise Dead

    def false_alarm(self, finding: Any, cause: str = "") -> Broken:
        """Why a finding on a healthy run came about, as far as one can see."""
        page, uid = getattr(finding, "page", None), getattr(finding, "uid", None)
        owner = self.drive.scheduler.cache_manager.allocator.pages.owner
        aborted = {job["id"] for job in self.workload["jobs"] if "abort" in job}
        if not cause and page is not None and 0 <= page < len(owner) and owner[page] == CACHE:
            cause = "shared"
        elif not cause and uid in self.made_way:
            cause = "retraction"
        elif not cause and page in self.gone:
            cause = "evicted"
        elif not cause and uid in aborted:
            cause = "hang-up"
        seen = f"Nothing was wrong, and it found: {getattr(finding, 'text', finding)!s:.160}"
        return Broken(
            cause or "false-alarm",
            "Over a healthy run the auditor is silent.",
            seen,
            step=self.drive.scheduler.next_step_id - 1,
            request=uid,
            page=page,
        )

    def named(self) -> bool:
        """Whether it named a place where the bug struck."""
        pages = {page for _, page in self.struck.places if page is not None}
        uids = {uid for uid, page in self.struck.places if page is None}
        return any(finding.page in pages or finding.uid in uids for finding in self.findings)


def audit(student: Student, workload: dict[str, Any], ready: set[str] | None = None) -> Audit:
    """Run the workload, with its bug. Raises `Broken`, and `Invalid` where the bug does not strike."""
    bug = workload["bug"]
    if bug and workload["dies"]:
        raise Invalid
    done = Audit(student, workload, ready)
    with ExitStack() as stack:
        stack.enter_context(tight() if workload["tight"] else nullcontext())
        late = {"late": True} if bug == "twice" and workload["late"] else {}
        stack.enter_context(BUGS[bug](done.struck, **late) if bug else nullcontext())
        try:
            run(done.drive, workload)
        except Dead:
            return done
        except AssertionError:  # the scheduler's own checks see the bug too: after it struck
            if not bug:
                raise
        except (ValueError, IndexError, KeyError):  # books in disorder
            if not done.struck.places:
                raise
    if not bug:
        if done.findings:
            raise done.false_alarm(done.findings[0])
        return done
    if not done.struck.places:
        raise Invalid
    if not done.named():
        uid, page = done.struck.places[0]
        seen = f"{_SAYS[bug]} It happened to request {uid}{'' if page is None else f' and page {page}'}; "
        if done.findings:
            seen += f"it named another place: {getattr(done.findings[0], 'text', done.findings[0])!s:.100}"
            raise Broken("place", "A finding names the page; of a reply, the request.", seen, request=uid, page=page)
        seen += "it found nothing."
        raise Broken(f"misses-{bug}", "The auditor finds every planted bug.", seen, request=uid, page=page)
    return done


_SAYS = {
    "leak": "A request left and kept its last page.",
    "twice": "A request gave a page back twice.",
    "in-flight": "A page was taken again while a launched step could still write to it.",
    "table": "A page was given back, and a request's page table went on naming it.",
    "reply": "A request got two final replies.",
}


def draw(workload: dict[str, Any]) -> str:
    """The workload in a few lines."""
    bug = f", bug: {workload['bug']}" if workload["bug"] else ""
    dies = f", the engine dies in step {workload['dies']}" if workload["dies"] else ""
    how = f"cache {workload['cache']}, overlap {'on' if workload['overlap'] else 'off'}{dies}{bug}"
    return how + "\n" + show(workload)


def any_run(rng: random.Random, size: int) -> dict[str, Any]:
    """A random run: hang-ups, little memory, engines that die."""
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
    """The gate of one part: it finds its bugs, and is silent without them."""

    def make(rng: random.Random, size: int) -> dict[str, Any]:
        if size <= len(bugs):
            return {**STRUCK[bugs[size - 1]](), "bug": bugs[size - 1]}
        if size <= len(bugs) + len(HEALTHY):
            return {**HEALTHY[size - len(bugs) - 1](), "bug": ""}
        if size == len(bugs) + len(HEALTHY) + 1 and "twice" in bugs:
            return {**late_workload(), "bug": "twice"}
        bug = rng.choice(["", *bugs])
        workload = any_run(rng, size)
        return {**workload, "bug": bug, "dies": 0 if bug else workload["dies"]}

    def check(student: Student, workload: dict[str, Any]) -> None:
        audit(student, workload, ready)

    return Gate(part, says, search(make, check, seconds=SECONDS, show=draw), part=f"ledger.{part}")


def silent(student: Student) -> str:
    """Healthy runs of every kind: no false alarm."""
    seen = {"runs": 0, "hang-ups": 0, "retractions": 0, "shared pages": 0}

    def make(rng: random.Random, size: int) -> dict[str, Any]:
        return {**HEALTHY[size - 1](), "bug": ""} if size <= len(HEALTHY) else any_run(rng, size)

    def check(student: Student, workload: dict[str, Any]) -> None:
        done = audit(student, workload)
        seen["runs"] += 1
        seen["hang-ups"] += sum("abort" in job for job in workload["jobs"])
        seen["retractions"] += len(done.made_way)
        seen["shared pages"] += done.drive.report.cached_tokens // workload["page_size"]

    search(make, check, seconds=SECONDS, show=draw)(student)
    return f"0 false alarms in {seen['runs']} runs: " + ", ".join(f"{n} {what}" for what, n in [*seen.items()][1:])


def five(student: Student) -> str:
    """Each bug on its own workload, then on random ones."""

    def make(rng: random.Random, size: int) -> dict[str, Any]:
        bug = list(BUGS)[(size - 1) % len(BUGS)]
        return {**(STRUCK[bug]() if size <= len(BUGS) else any_run(rng, size)), "dies": 0, "bug": bug}

    found: set[str] = set()

    def check(student: Student, workload: dict[str, Any]) -> None:
        audit(student, workload)
        found.add(workload["bug"])

    search(make, check, seconds=SECONDS, show=draw)(student)
    assert student.replay is not None or len(found) == len(BUGS), f"only {found} struck"
    return f"{len(found)} of {len(BUGS)} planted bugs found"


def metrics(served: Served) -> str:
    """The real server with hang-ups: the auditor exposes what it found, and that is nothing."""
    assert served.server is not None
    found = {k: v for k, v in served.server.metrics().items() if k.startswith("minisgl_audit_")}
    alarms = sum(value for name, value in found.items() if name.startswith("minisgl_audit_findings_total"))
    if not found or alarms:
        seen = f"/metrics says {alarms:.0f} findings." if found else "/metrics has nothing of the auditor's."
        raise Broken("false-alarm", "Over a healthy run the auditor is silent, and /metrics says so.", seen)
    cached = found.get('minisgl_audit_pages{owner="cache"}', 0.0)
    return f"/metrics: 0 findings, {cached:.0f} pages followed into the cache"


GATES = (
    gate_of("pages", "who owns a page, and who gives it back", ["twice"], PAGES),
    gate_of("steps", "what launched steps may still touch", ["in-flight", "table"], PAGES | STEPS),
    gate_of("requests", "replies, and what a request leaves behind", ["leak", "reply"], None),
    Gate("silent", "no false alarm over healthy runs", silent),
    Gate("five", "each planted bug is found", five),
    facts(["minisgl_pages_allocated", "minisgl_batch_scheduled", "minisgl_request_finished"]),
    Gate("metrics", "/metrics shows what was found", metrics, served=True),
)
