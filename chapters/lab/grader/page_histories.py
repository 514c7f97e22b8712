"""Histories of hook calls for the gates of lab `ledger`: no engine runs, and any event may break a rule.

An event is a list: ``["add", uid]``, ``["allocate", uids, pages]``, ``["cache", uid, pages]``, ``["evict", pages]``,
``["retire", uid, pages]``, ``["launch", admissions, rows, updates]`` (``[row, uid]`` of each admission and of each row
of the step, ``[row, column, page]`` of each page-table update), ``["read"]``, ``["retract", uid]`` and ``["finish",
uid, reason]`` with an index of `REASONS`.

`Rules` says what an auditor must report after every event, also after findings. It raises `Invalid` for events that no
hook can tell of, and where the text of the lab leaves open what follows; `Open` lists these. Knows the hooks, and no
auditor.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from minisgl.chapters.lab.grader.gate import Invalid
from minisgl.core import Admission, Req, SamplingParams, Step, StepResult

__all__ = ["Expected", "Rules", "all_changes", "large_history", "make_history", "show_history"]

CACHE = -1
REASONS = ("stop", "length", "abort", "error")
FAILED = 3
"""The index of the reason of requests that an engine failure ended."""
LENGTHS = {"add": 2, "allocate": 3, "cache": 3, "evict": 2, "retire": 3, "launch": 4, "read": 1, "retract": 2}
LENGTHS |= {"finish": 3}
SHOWN = 6
"""The number of events that a verdict shows: the last ones."""
Pages = Sequence[int]
COLUMNS = (1, 1, 1, 64, 256, 512, 1000, 1024, 2048, 4096)
"""Distances of the page-table columns of a history: with some of them, requests have thousands of columns."""


class Open(Invalid):
    """The text of the lab leaves open what an auditor reports.

    It does so in these histories only:

    - another than its owner moves the same page twice in one call (one finding or two), or one call allocates the same
      page three times;
    - a row names the same page in two columns;
    - a leaked page is allocated while a step is unread that was launched before the leak (`in-flight`, or free);
    - the engine has failed, and anything but final replies follows.
    """


class Expected(NamedTuple):
    """A finding that an auditor must report. ``steps`` are the allowed values."""

    rule: str
    uid: int | None
    page: int | None
    steps: tuple[int, ...]

    def allows(self, finding: Any) -> bool:
        """Return whether this is the finding, apart from its step. The uid of an eviction is None or `CACHE`."""
        uids = (None, CACHE) if self.uid is None else (self.uid,)
        return bool(finding.rule == self.rule and finding.uid in uids and finding.page == self.page)


class Rules:
    """The owners, the page tables and the open requests after a history's events, and the hooks that tell of them.

    ``hook`` None: no auditor listens. ``first`` is added to the numbers of requests, and ``shift`` to those of pages.
    """

    def __init__(self, hook: Any = None, first: int = 0, shift: int = 0):
        self.hook, self.first, self.shift = hook, first, shift
        self.owner: dict[int, int] = {}
        self.until: dict[int, int] = {}
        self.table: dict[int, dict[int, int]] = {}
        self.uncleared: dict[int, dict[int, int]] = {}  # what `table` would be if no admission emptied a row
        self.reqs: dict[int, Req] = {}
        self.open: set[int] = set()
        self.holder: dict[int, int] = {}  # request-pool row -> the request that has it
        self.leaked: dict[int, int] = {}  # leaked page -> the last step launched before the leak
        self.failed = False
        self.launched = self.read_step = -1
        self.in_flight: list[list[int]] = []  # the uids of the rows of each unread step
        self.found: list[Expected] = []
        self.changed = ""  # the argument of a hook that the auditor has changed

    def apply(self, event: Sequence[Any]) -> list[Expected]:
        """Call the hooks of one event and return the findings that it must cause."""
        if not event or len(event) != LENGTHS.get(event[0]):
            raise Invalid  # an event that was shrunk
        kind, *args = event
        if self.failed and (kind != "finish" or args[1] != FAILED):
            raise Open  # after an engine failure, all requests end
        self.found = []
        getattr(self, kind)(*args)
        return self.found

    def tell(self, name: str, arrays: Sequence[str] = (), **arguments: Any) -> None:
        """Call a hook. ``arrays`` names the arguments that must not change."""
        if self.hook is None:
            return
        before = {each: list(arguments[each]) for each in arrays}
        getattr(self.hook, name)(**arguments)
        self.changed = next((each for each in arrays if list(arguments[each]) != before[each]), self.changed)

    def expect(self, rule: str, uid: int | None, page: int | None = None) -> None:
        """Record that the auditor must report a finding in this event."""
        shown = None if uid is None else uid + self.first
        self.found.append(Expected(rule, shown, None if page is None else page + self.shift, (self.launched,)))

    def numbers(self, pages: Pages) -> Any:
        """Return the numbers of pages as an array."""
        if not all(type(p) is int and p >= 0 for p in pages):
            raise Invalid
        return np.array(pages, np.int32) + np.int32(self.shift)

    def req(self, uid: int) -> Req:
        """Return an added request. Raise `Invalid` if there is none."""
        if uid not in self.reqs:
            raise Invalid
        return self.reqs[uid]

    def owner_of(self, number: int | None) -> int | None:
        """Return the owner of the page with this number: the number of a request, or CACHE, or None."""
        owner = None if number is None else self.owner.get(number - self.shift)
        return owner if owner is None or owner == CACHE else owner + self.first

    def table_of(self, number: int | None) -> set[int] | None:
        """Return the numbers of the pages in the row of the request with this number, or None if it has no row."""
        row = next((row for row, uid in self.holder.items() if uid + self.first == number), None)
        return None if row is None else {page + self.shift for page in self.table[row].values()}

    def twice_if_uncleared(self, number: int | None, page: int | None) -> bool:
        """Return whether the request's row would name the page twice if admissions did not empty the row."""
        pages = [self.uncleared.get(row, {}) for row, uid in self.holder.items() if uid + self.first == number]
        return page is not None and any(list(row.values()).count(page - self.shift) > 1 for row in pages)

    # ---- requests -----------------------------------------------------------------------------------------

    def add(self, uid: int) -> None:
        """Add a request."""
        if uid in self.reqs or type(uid) is not int or uid < 0:
            raise Invalid
        number = uid + self.first
        self.reqs[uid] = Req(number, np.zeros(1, np.int32), SamplingParams(max_tokens=1), number)
        self.open.add(uid)
        self.tell("minisgl_request_added", req=self.reqs[uid], now=0.0)

    def retract(self, uid: int) -> None:
        """Retract a request: each page that it still owns is a leak."""
        if uid not in self.open:
            raise Invalid
        self.leave_row(uid)
        self.leave(uid)
        self.tell("minisgl_request_retracted", req=self.req(uid), step=self.launched + 1)

    def finish(self, uid: int, reason: int) -> None:
        """End a request: a second end is an error, and so is each page that it still owns, unless the engine failed."""
        req = self.req(uid)
        if not 0 <= reason < len(REASONS):
            raise Invalid
        req.finish_reason = REASONS[reason]  # type: ignore[assignment]
        self.failed = self.failed or reason == FAILED
        self.leave_row(uid)
        if uid not in self.open:
            self.expect("reply", uid)
        self.open.discard(uid)
        if reason != FAILED:
            self.leave(uid)
        self.tell("minisgl_request_finished", req=req, now=0.0)

    def leave_row(self, uid: int) -> None:
        """Take the request-pool row from a request that does not run any more."""
        self.holder = {row: who for row, who in self.holder.items() if who != uid}
        self.req(uid).req_pool_idx = -1

    def leave(self, uid: int) -> None:
        """Expect a leak for each page that the request still owns. The page has no owner from then on."""
        for page in [page for page, owner in self.owner.items() if owner == uid]:
            self.expect("leak", uid, page)
            self.leaked[page] = self.launched
            del self.owner[page]

    # ---- pages --------------------------------------------------------------------------------------------

    def allocate(self, uids: Sequence[int], pages: Pages) -> None:
        """Allocate pages, each to a request."""
        numbers = self.numbers(pages)
        if len(uids) != len(pages) or not set(uids) <= self.open:
            raise Invalid
        for i, (uid, page) in enumerate(zip(uids, pages, strict=True)):
            if pages[:i].count(page) > 1:
                raise Open  # the third time in one call
            if page in self.owner:
                self.expect("owner", uid, page)
            elif self.leaked.get(page, -1) > self.read_step:
                raise Open
            elif self.until.get(page, -1) > self.read_step:
                self.expect("in-flight", uid, page)
            self.leaked.pop(page, None)
            self.until.pop(page, None)
            self.owner[page] = uid
        owners = np.array(uids, np.int32) + np.int32(self.first)
        self.tell("minisgl_pages_allocated", ["owners", "pages"], step=self.launched + 1, owners=owners, pages=numbers)

    def cache(self, uid: int, pages: Pages) -> None:
        """Transfer pages of a request to the cache."""
        numbers = self.numbers(pages)
        req = self.req(uid)
        self.move(uid, pages, CACHE)
        more = {"step": self.launched, "start": 0, "cached_pages": numbers.copy()}
        self.tell("minisgl_pages_cached", ["pages"], req=req, pages=numbers, **more)

    def evict(self, pages: Pages) -> None:
        """Evict pages from the cache."""
        numbers = self.numbers(pages)
        self.move(CACHE, pages, None)
        self.tell("minisgl_pages_evicted", ["pages"], step=self.launched + 1, pages=numbers)

    def retire(self, uid: int, pages: Pages) -> None:
        """Retire pages of a request."""
        numbers = self.numbers(pages)
        self.req(uid)
        for page in self.move(uid, pages, None):
            self.until[page] = self.launched
        owner = uid + self.first
        self.tell("minisgl_pages_freed", ["pages"], step=self.launched, owner=owner, pages=numbers)

    def move(self, old: int, pages: Pages, new: int | None) -> list[int]:
        """Change the owner of the pages whose owner is ``old``, and return them. For another page, expect a finding."""
        moved: list[int] = []
        for page in pages:
            if self.owner.get(page) == old:
                moved.append(page)
                del self.owner[page]
                if new is not None:
                    self.owner[page] = new
            elif pages.count(page) - (page in moved) > 1:
                raise Open
            else:
                self.expect("owner", None if old == CACHE else old, page)
        return moved

    # ---- steps --------------------------------------------------------------------------------------------

    def launch(self, admissions: Any, rows: Any, updates: Any) -> None:
        """Launch a step: apply its admissions and its updates, and check every page that its rows read."""
        lengths = [len(each) for each in (*admissions, *rows)]
        if set(lengths) - {2} or {len(update) for update in updates} - {3} or not rows:
            raise Invalid
        flat = [number for each in (*admissions, *rows, *updates) for number in each]
        if any(type(number) is not int or number < 0 for number in flat):
            raise Invalid
        if len({row for row, _ in rows}) < len(rows) or len({uid for _, uid in rows}) < len(rows):
            raise Invalid
        if not {uid for _, uid in rows} <= self.open or not {tuple(a) for a in admissions} <= {tuple(r) for r in rows}:
            raise Invalid
        for row, uid in admissions:
            if row in self.holder or uid in self.holder.values():
                raise Invalid
            self.table[row], self.holder[row] = {}, uid
            self.req(uid).req_pool_idx = row
        if any(self.holder.get(row) != uid for row, uid in rows):
            raise Invalid
        for row, column, page in updates:
            if row not in self.holder:
                raise Invalid
            self.table[row][column] = page
            self.uncleared.setdefault(row, {})[column] = page
        self.launched += 1
        self.in_flight.append([uid for _, uid in rows])
        for row, uid in rows:
            pages = list(self.table.get(row, {}).values())
            if len(set(pages)) < len(pages):
                raise Open
            for page in pages:
                if self.owner.get(page) not in (uid, CACHE):
                    self.expect("table", uid, page)
        self.found = [each._replace(steps=(self.launched - 1, self.launched)) for each in self.found]
        self._tell_launch(admissions, rows, updates)

    def _tell_launch(self, admissions: Any, rows: Any, updates: Any) -> None:
        indices = np.array([row for row, _ in rows], np.int32)
        kinds = self.kinds_of(self.launched, len(rows))
        num_tokens, samples = np.array(kinds, np.int32).T
        num_decode = sum(kind == (1, 1) for kind in kinds)
        starts, inputs = np.full(len(rows), 3, np.int32), np.ones(int(num_tokens.sum()), np.int32)
        places = np.array(updates, np.int32).reshape(-1, 3).T.copy()
        places[2] += self.shift
        admitted = tuple(Admission(row, uid + self.first, SamplingParams(max_tokens=1), 0) for row, uid in admissions)
        step = Step(
            self.launched, indices, starts, num_tokens, samples, num_decode, 0, inputs,
            (places[0], places[1], places[2]), admitted,
        )  # fmt: skip
        reqs = [self.reqs[uid] for _, uid in rows]
        self.tell("minisgl_batch_scheduled", ["reqs"], step=step, reqs=reqs, now=0.0)

    @staticmethod
    def kinds_of(step: int, rows: int) -> list[tuple[int, int]]:
        """Return the tokens that each row of a step computes, and samples: decode rows first, then prompt chunks.

        By turns, a step has decode rows only, both kinds, and chunks only. Not every chunk ends its prompt.
        """
        decode = (rows, rows // 2, 0)[step % 3]
        return [(1, 1) if i < decode else (2 + (7 * i + step) % 40, (i + step) % 2) for i in range(rows)]

    def read(self) -> None:
        """Read the result of the oldest unread step."""
        if self.read_step >= self.launched:
            raise Invalid
        self.read_step += 1
        uids = self.in_flight.pop(0)
        gained = [sampled for _, sampled in self.kinds_of(self.read_step, len(uids))]
        result = StepResult(self.read_step, np.zeros((len(uids), 1), np.int32), np.array(gained, np.int32))
        running = set(self.holder.values())
        reqs = [self.reqs[uid] if uid in running and n else None for uid, n in zip(uids, gained, strict=True)]
        self.tell("minisgl_step_finished", result=result, reqs=reqs, now=0.0)


# ---- random histories ----------------------------------------------------------------------------------------


class _Maker:
    """Makes a random history that a scheduler could cause, with an error now and then."""

    def __init__(self, rng: random.Random, kinds: Sequence[str], errors: float, watched: bool = False):
        """``watched``: after each event, a step with all running requests checks their pages, and has no updates."""
        self.rng, self.kinds, self.errors, self.watched = rng, kinds, errors, watched and "launch" in kinds
        self.rules, self.events = Rules(), [["add", uid] for uid in range(3)]
        self.rows: dict[int, int] = {}  # uid -> row of a running request
        self.most = rng.choice([4, 8, 24])  # number of pages
        self.column = rng.choice(COLUMNS)  # every column of the page table is a multiple of this number
        for event in self.events:
            self.rules.apply(event)

    def pages(self, owner: int | None) -> list[int]:
        """Return the pages of an owner (None: free pages)."""
        held = self.rules.owner
        if owner is None:
            unread = {p for p, step in self.rules.until.items() if step > self.rules.read_step}
            return [p for p in range(self.most) if p not in held and p not in unread]
        return [p for p, who in held.items() if who == owner]

    def some(self, pages: list[int], most: int = 3) -> list[int]:
        """Return a few of the pages; rarely, one of them is another page."""
        some = self.rng.sample(pages, min(len(pages), self.rng.randint(1, most)))
        if self.rng.random() < self.errors:
            unread = [p for p, step in self.rules.until.items() if step > self.rules.read_step]
            other = unread if unread and self.rng.random() < 0.6 else list(range(self.most))
            other = [p for p in other if p not in some]
            some = [*some[1:], *self.rng.sample(other, min(1, len(other)))]
            some += some[:1] * (self.rng.random() < 0.2)  # the same page twice in one call
            self.rng.shuffle(some)
        return some

    def run(self, length: int) -> list[list[Any]]:
        """Return a history of about ``length`` events."""
        for _ in range(length):
            for event in self.turn(self.rng.choice(self.kinds)):
                if not self.try_event(event):
                    break
                if self.watched:
                    rows = [[row, uid] for uid, row in sorted((uid, row) for row, uid in self.rules.holder.items())]
                    self.try_event(["launch", [], rows, []])
        return self.events

    def try_event(self, event: list[Any]) -> bool:
        """Append an event to the history, if it can happen there. Return whether it can."""
        try:
            self.rules.apply(event)
        except Invalid:
            self.rules = Rules()
            for earlier in self.events:
                self.rules.apply(earlier)
            return False
        self.events.append(event)
        return True

    def turn(self, kind: str) -> list[list[Any]]:
        """Return the events of one turn."""
        rng, opened = self.rng, sorted(self.rules.open)
        if kind == "add" or not opened:
            return [["add", len(self.rules.reqs)]]
        uid = rng.choice(opened)
        if kind == "allocate":
            pages = self.some(self.pages(None))
            uids = [rng.choice(opened) for _ in pages]
            return [["allocate", uids, pages]] if pages else []
        if kind in ("cache", "retire"):
            pages = self.some(self.pages(uid))
            return [[kind, uid, pages]] if pages else []
        if kind == "evict":
            pages = self.some(self.pages(CACHE))
            return [["evict", pages]] if pages else []
        if kind == "launch":
            return self.launch(uid, opened)
        if kind == "read":
            return [["read"]]
        if kind == "walk":
            return self.walk(opened)
        if kind == "again":  # a request that has ended gets another final reply
            ended = sorted(self.rules.reqs.keys() - self.rules.open)
            return [["finish", rng.choice(ended), rng.randrange(3)]] if ended and rng.random() < self.errors else []
        mine = [page for page, owner in self.rules.owner.items() if owner == uid]
        if mine and rng.random() > self.errors:
            kept = [page for page in mine if rng.random() < 0.5]
            rest = [page for page in mine if page not in kept]
            give = [["cache", uid, kept]] * bool(kept) + [["retire", uid, rest]] * bool(rest)
        else:
            give = []
        if kind == "retract":
            return [*give, ["retract", uid]]
        end = ["finish", uid, rng.randrange(3)]
        if rng.random() < 0.1:  # the engine fails: all requests end
            ends = [["finish", each, FAILED] for each in opened]
            late = [["finish", each, FAILED] for each in self.rules.reqs]
            return ends + [rng.choice(late)] * (rng.random() < self.errors)
        return [*give, end, end] if rng.random() < self.errors else [*give, end]

    def walk(self, opened: list[int]) -> list[list[Any]]:
        """Return the events in which one page changes its owner several times, not always by its owner."""
        rng, page, events = self.rng, self.rng.randrange(self.most), list[list[Any]]()
        owner = self.rules.owner.get(page)
        for _ in range(rng.randint(2, 6)):
            actor = owner
            if rng.random() < self.errors:
                actor = rng.choice([None, CACHE, *opened])
            if actor is None:
                owner = rng.choice(opened)
                events.append(["allocate", [owner], [page]])
                continue
            to = None if actor == CACHE else rng.choice([None, CACHE])
            events.append(["evict", [page]] if actor == CACHE else ["retire" if to is None else "cache", actor, [page]])
            owner = to if actor == owner else owner
        return events

    def launch(self, uid: int, opened: list[int]) -> list[list[Any]]:
        """Return the launch of a step: it admits a request, or a running request gets a page more, or none changes."""
        rng, admissions, updates = self.rng, [], []
        self.rows = {who: row for row, who in self.rules.holder.items()}
        if uid not in self.rows:
            row = rng.choice([r for r in range(8) if r not in self.rows.values()] or [8 + uid])
            self.rows[uid] = row
            admissions = [[row, uid]]
        row = self.rows[uid]
        table = {} if admissions else dict(self.rules.table.get(row, {}))
        mine = [p for p in (*self.pages(uid), *self.pages(CACHE)) if p not in table.values()]
        columns = [self.column * i for i in rng.sample(range(6), rng.randint(0 if table else 1, 3))]
        updates += [[row, column, mine.pop(rng.randrange(len(mine)))] for column in columns[: len(mine)]]
        if updates and rng.random() < 0.3 and mine:  # a column is written twice: the last one counts
            updates.append([row, updates[0][1], mine.pop()])
        if updates and rng.random() < self.errors:
            other = [p for p in range(self.most) if p not in table.values()]
            updates[-1][2] = rng.choice(other or [0])
        more = [[r, u] for u, r in self.rows.items() if u != uid and u in opened and rng.random() < 0.7]
        for other_row in {r for u, r in self.rows.items() if u != uid} & self.rules.table.keys():
            if rng.random() < 0.3 and mine and [other_row] not in [each[:1] for each in more]:
                # A request that has no row in this step gets a page in its table, for example a cached one.
                columns = sorted(self.rules.table[other_row]) or [0]
                updates.append([other_row, rng.choice(columns), mine.pop()])
        return [["launch", admissions, [[row, uid], *more], updates]]


KINDS = {
    "pages": ("allocate", "allocate", "cache", "evict", "retire", "add", "walk"),
    "steps": (*("allocate",) * 3, "cache", "evict", "retire", *("launch",) * 3, "read", "walk", "walk"),
}
KINDS["requests"] = (*KINDS["steps"], "read", "add", "retract", "finish", "finish", "again")


def make_history(rng: random.Random, size: int, part: str) -> dict[str, Any]:
    """Return a random history with the events of a part of the lab and of the parts before it.

    ``auditors`` is the number of auditors that get it; the second gets each event later, for other requests.
    """
    errors = rng.choice([0.0, 0.1, 0.4])
    events = _Maker(rng, KINDS[part], errors, watched=rng.random() < 0.4).run(10 + min(size, 30))
    first, shift = rng.choice([0, 0, 1, 2**24]), rng.choice([0, 0, 2**20])
    return {"events": events, "first": first, "shift": shift, "auditors": rng.randint(1, 2)}


def all_changes(rng: random.Random, part: str) -> dict[str, Any]:
    """Return a history that tries every change of owner, by every request and by the cache, on pages of every state.

    Each change concerns a page of its own. With the part ``steps``, a step also reads pages of every state.
    """
    states: list[list[list[Any]]] = [
        [],
        *([["allocate", [uid], [0]]] for uid in (0, 1, 2)),
        [["allocate", [1], [0]], ["cache", 1, [0]]],
        [["allocate", [1], [0]], ["cache", 1, [0]], ["evict", [0]]],
        [["allocate", [1], [0]], ["retire", 1, [0]]],
    ]
    changes: list[list[Any]] = [["evict", [0]], *(["allocate", [uid], [0]] for uid in (0, 1))]
    changes += [[kind, uid, [0]] for kind in ("cache", "retire") for uid in (0, 1)]
    events: list[list[Any]] = [["add", 0], ["add", 1], ["add", 2]]
    pairs = [(state, change) for state in states for change in changes]
    rng.shuffle(pairs)
    for page, (state, change) in enumerate(pairs):
        events += [[*event[:-1], [page]] for event in (*state, change)]
    if part == "pages":
        return {"events": events, "first": 0, "shift": 0, "auditors": 1}
    for number, state in enumerate(states):  # a new request reads a page of its own, and one of this state
        page, reader = 100 + number, 3 + number
        events += [[*event[:-1], [page]] for event in state]
        events += [["add", reader], ["allocate", [reader], [200 + number]]]
        updates = [[number, 5, page], [number, 2, 200 + number]]
        events += [["launch", [[number, reader]], [[number, reader]], updates], ["read"]]
    if part == "requests":
        events += _ends(20, rng)
    return {"events": events, "first": 0, "shift": 0, "auditors": 1}


def read_before_and_after(part: str) -> list[list[Any]]:
    """Return events in which a request reads a page right before and right after each change of the page's owner.

    Each combination of a page's state and a change has a page and requests that no other combination has. The steps
    have no updates and no other rows, so an auditor that checks a row only after some of the changes misses an error.
    """
    events: list[list[Any]] = []
    for state in range(5):
        for change in range(9 if part == "requests" else 7):
            number = len(events)  # no two pairs begin at the same event
            reader, owner, other, page = number, number + 1, number + 2, number
            events += [["add", uid] for uid in (reader, owner, other)]
            events.append(["allocate", [reader if state == 0 else owner], [page]])
            more: list[list[Any]] = [["cache", owner, [page]], ["retire", owner, [page]], ["evict", [page]]]
            events += [[], [], more[:1], more[1:2], [more[0], more[2]]][state]
            step: list[Any] = ["launch", [], [[number, reader]], []]
            events += [["launch", [[number, reader]], [[number, reader]], [[number, 3, page]]], step, ["read"]]
            changes: list[list[Any]] = [
                ["evict", [page]],
                ["allocate", [other], [page]],
                ["allocate", [reader], [page]],
            ]
            changes += [[kind, uid, [page]] for kind in ("cache", "retire") for uid in (reader, owner)]
            events += [[*changes, ["finish", owner, 0], ["retract", owner]][change], step, step, ["read"], step]
            events += [["read"]] * 3
    return events


def _ends(first: int, rng: random.Random) -> list[list[Any]]:
    """Return the events in which requests end for every reason, with and without pages, once or twice."""
    cases = [(reason, pages, times) for reason in range(3) for pages in range(3) for times in (1, 2)]
    rng.shuffle(cases)
    events: list[list[Any]] = []
    for uid, (reason, pages, times) in enumerate(cases, first):
        mine = [1000 + 10 * uid + i for i in range(3 + pages)]  # the cache gets three of them
        events += [["add", uid], ["allocate", [uid] * len(mine), mine], ["cache", uid, mine[:3]]]
        events += [["finish", uid, reason]] * (1 if pages else times)
    more = first + len(cases)
    events += [["add", more], ["add", more + 1], ["allocate", [more, more], [900, 901]], ["retract", more + 1]]
    return [*events, *(["finish", uid, FAILED] for uid in (more, more + 1, more))]


def special_histories(part: str) -> list[dict[str, Any]]:
    """Return short histories of a part that random ones rarely reach.

    Each has one error, except those in which request 0 runs again in its row: an auditor must report nothing there.
    """
    two: list[list[Any]] = [["add", 0], ["add", 1], ["allocate", [0, 1], [3, 4]]]
    found = {
        "pages": [
            [*two, ["allocate", [0, 1], [5, 5]]],  # one page for two requests in one call
            [*two, ["allocate", [], []], ["cache", 0, []], ["retire", 0, []], ["evict", []], ["allocate", [0], [4]]],
            [*two, ["retire", 0, [3, 3]]],
            [*two, ["cache", 0, [3, 3]]],
        ]
    }
    # The row of each request has the number of the other request.
    running = [*two, ["launch", [[1, 0], [0, 1]], [[1, 0], [0, 1]], [[1, 0, 3], [0, 0, 4]]]]
    both: list[Any] = ["launch", [], [[1, 0], [0, 1]], []]
    one: list[Any] = ["launch", [], [[1, 0]], []]
    deep = [*running, *[both] * 6, ["retire", 0, [3]], ["read"]]
    retracted = [*two, ["allocate", [0], [5]], ["retire", 1, [4]], ["allocate", [0], [4]],
             ["launch", [[1, 0]], [[1, 0]], [[1, 0, 3], [1, 1, 4], [1, 2, 5]]], ["read"],
             ["retire", 0, [3, 4, 5]], ["retract", 0]]  # fmt: skip
    found["steps"] = [
        [*deep, ["allocate", [1], [3]]],  # the step that retired the page is the seventh unread one
        [*deep, *[["read"]] * 5, ["allocate", [1], [3]]],
        # Request 1 has no row in the step that brings its update.
        [*running, ["allocate", [1], [5]], ["cache", 0, [3]], ["launch", [], [[1, 0]], [[0, 0, 5]]],
         ["retire", 1, [4]], both, ["retire", 1, [5]], both],
        [*running, ["retire", 0, [3]], one, one, one],  # each step that reads the page is an error
        [["add", 0], ["allocate", [0] * 100, list(range(10, 110))],
         ["launch", [[0, 0]], [[0, 0]], [[0, i, 10 + i] for i in range(100)]],
         ["retire", 0, [12]], ["launch", [], [[0, 0]], []]],
        # A row with 2,500 pages, and two requests in rows with large numbers.
        [["add", 0], ["allocate", [0] * 2_500, list(range(10, 2_510))],
         ["launch", [[0, 0]], [[0, 0]], [[0, i, 10 + i] for i in range(2_500)]],
         ["retire", 0, [12]], ["launch", [], [[0, 0]], []]],
        [*two, ["launch", [[5_000, 0], [5_000 - 4_096, 1]], [[5_000, 0], [5_000 - 4_096, 1]],
                [[5_000, 0, 3], [5_000 - 4_096, 0, 4]]], ["launch", [], [[5_000, 0]], []],
         ["retire", 0, [3]], ["launch", [], [[5_000, 0]], []], ["read"]],
        # A step writes a column twice, the larger page first; and a row has a page far behind the others.
        [*two, ["allocate", [0], [5]], ["launch", [[1, 0]], [[1, 0]], [[1, 0, 5], [1, 0, 3]]], ["retire", 0, [3]], one],
        [*two, ["allocate", [0], [5]], ["launch", [[1, 0]], [[1, 0]], [[1, 0, 3], [1, 9_000, 5]]], ["retire", 0, [5]],
         one],
        # The page was retired, and no step was read since: the second request gets a page that has an owner.
        [*running, ["retire", 0, [3]], ["allocate", [1, 0], [3, 3]]],
        # A request is retracted and runs again, in the row that it had: at once, or after another row.
        [*retracted, *_runs_again(1, 5), one],
        [*retracted, *_runs_again(2, 5), ["read"], ["retire", 0, [5]], ["retract", 0], *_runs_again(1, 6), one],
        [*retracted, ["allocate", [1, 1], [3, 4]], *_runs_again(1, 5), one],
    ]  # fmt: skip
    some, later = list(range(20)), list(range(20, 40))
    six = [[5 - uid, uid] for uid in range(6)]  # the row of each request
    running_six: list[list[Any]] = [["add", uid] for uid in range(6)]
    running_six += [["allocate", list(range(6)), list(range(20, 26))]]
    running_six += [["launch", six, six, [[row, 0, 20 + uid] for row, uid in six]], ["read"], ["retire", 3, [23]]]
    retired_five: list[list[Any]] = [["retire", uid, [20 + uid]] for uid in range(6) if uid != 3]
    retired_five.append(["launch", [], [each for each in six if each[1] != 3], []])
    rows, again = [[i, i] for i in some], [[i, i + 20] for i in some]
    found["requests"] = [
        # Twenty requests get the rows of twenty others at once, with pages in another column.
        [
            *(["add", uid] for uid in (*some, *later)),
            ["allocate", some, some],
            ["launch", rows, rows, [[i, 0, i] for i in some]],
            ["read"],
            *(event for i in some for event in (["retire", i, [i]], ["finish", i, 0])),
            ["allocate", later, later],
            ["launch", again, again, [[i, 1, i + 20] for i in some]],
            ["retire", 20, [20]],
            ["launch", [], again, []],
        ],
        # Request 1 ends; the row of request 0, which has its number, still names a page that is retired.
        [*running, ["read"], ["retire", 1, [4]], ["finish", 1, 0], ["retire", 0, [3]], one],
        [*running, ["read"], ["retire", 1, [4]], ["retract", 1], ["retire", 0, [3]], one],
        [*two, ["allocate", [0] * 40, list(range(10, 50))], ["finish", 0, 0]],  # many leaks
        [*two, ["allocate", [1] * 1_500, list(range(10, 1_510))], ["retract", 1]],
        # Request 3 ends, or is retracted. The rows of the others still name pages that are retired.
        [*running_six, ["finish", 3, 0], *retired_five],
        [*running_six, ["retract", 3], *retired_five],
        [*two, ["retract", 0]],
        [*two, ["retract", 0], ["finish", 0, 0]],  # the page has leaked once
        [*running, ["read"], ["retract", 1]],
        [*running, ["read"], ["cache", 0, [3]], ["finish", 0, 2], ["finish", 0, 2], ["finish", 1, 2]],
    ]
    if part != "pages":
        found[part].append(read_before_and_after(part))
    return [{"events": events, "first": 0, "shift": 0, "auditors": 1} for events in found[part]]


def _runs_again(row: int, page: int) -> list[list[Any]]:
    """Return the events in which request 0 gets a page and is admitted into a row."""
    return [["allocate", [0], [page]], ["launch", [[row, 0]], [[row, 0]], [[row, 0, page]]]]


def large_history(part: str) -> dict[str, Any]:
    """Return a history of 400 requests with 4 pages each, of which the last one breaks a rule of the part.

    With the part ``steps``, request 0 has also retired 5,000 pages before a step was read, and gets the first of them.
    """
    uids = list(range(400))
    pages = [[4 * uid + i for i in range(4)] for uid in uids]
    events: list[list[Any]] = [["add", uid] for uid in uids]
    events.append(["allocate", [uid for uid in uids for _ in range(4)], [page for mine in pages for page in mine]])
    if part != "pages":
        rows, updates = [[uid, uid] for uid in uids], [[uid, i, pages[uid][i]] for uid in uids for i in range(4)]
        events += [["launch", rows, rows, updates], ["launch", [], rows, []], ["read"], ["read"]]
        more = list(range(2_000, 7_000))
        events += [["allocate", [0] * len(more), more], ["launch", [], rows, []], ["retire", 0, more]]
        events += [["allocate", [0], more[:1]], ["read"]]
        events += [["cache", 399, pages[399][:3]], ["retire", 399, pages[399][3:]], ["launch", [], rows, []]]
    if part == "requests":
        events.append(["finish", 398, 0])
    return {"events": [*events, ["retire", 397, pages[396]]], "first": 0, "shift": 0, "auditors": 1}


def show_history(workload: dict[str, Any]) -> str:
    """Describe a history in a line per event."""
    first, shift = workload["first"], workload["shift"]
    lines = ["two auditors; the second gets each event three events later, for other requests"]
    lines = lines if workload["auditors"] > 1 else []
    step = read = -1
    for kind, *args in (event for event in workload["events"] if event and len(event) == LENGTHS.get(event[0])):
        if kind == "launch":
            step += 1
            admitted = "".join(f" admits request {uid + first} into row {row}," for row, uid in _of(args[0], 2))
            updates = ", ".join(f"({row}, {column}, {page + shift})" for row, column, page in _of(args[2], 3)) or "none"
            rows = ", ".join(f"row {row} of request {uid + first}" for row, uid in _of(args[1], 2)) or "no rows"
            lines.append(f"step {step}{admitted} has {rows}; page-table updates {updates}")
        elif kind == "read":
            read += 1
            lines.append(f"the result of step {read} is read")
        elif kind == "evict":
            lines.append(f"the cache evicts pages {_numbers(args[0], shift)}")
        elif kind == "allocate":
            lines.append(f"pages {_numbers(args[1], shift)} are allocated to requests {_numbers(args[0], first)}")
        else:
            what = {"add": "is added", "retract": "is retracted", "cache": "gives the cache pages", "retire": "retires"}
            how = f"ends ({REASONS[args[1]]})" if kind == "finish" else what[kind]
            pages = f" {_numbers(args[1], shift)}" if kind in ("cache", "retire") else ""
            lines.append(f"request {args[0] + first} {how}{pages}")
    if len(lines) > SHOWN:
        lines = [f"… {len(lines) - SHOWN + 1} events before", *lines[1 - SHOWN :]]
    return "\n".join(lines)


def _of(parts: Sequence[Any], length: int) -> list[Any]:
    return [part for part in parts if len(part) == length]


def _numbers(numbers: Sequence[int], shift: int) -> str:
    return "[" + ", ".join(str(number + shift) for number in numbers[:12]) + (", …" * (len(numbers) > 12)) + "]"
