"""A trace against the promises: every event is looked at before it happens, in the state that those before it left.

Knows what each event must find; what follows from an event is `State`'s business, what pages hold `Contents`'s. The
first broken rule ends the check: what comes after it may be its consequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from minisgl.trace import events as ev
from minisgl.trace.contents import Contents
from minisgl.trace.read import Trace
from minisgl.trace.state import CACHE, FREE, RETIRING, Launch, Request, State
from minisgl.trace.violation import Violation

__all__ = ["Checker", "check"]

PATIENCE = 8
"""Steps beyond ``starvation_steps`` that a running request may be left out: those that are forced share a step."""


def check(trace: Trace) -> Violation | None:
    """The first violation of a rule, or None."""
    checker = Checker(trace)
    for number, event in enumerate(trace, 2):  # the header is line 1
        try:
            checker.take(event)
        except Violation as violation:
            violation.line = number
            return violation
    return None


class Checker:
    """Takes a trace's events in order; raises `Violation` at the first that must not be."""

    def __init__(self, trace: Trace):
        options = trace.header.options
        self.spec = trace.spec
        self.state = State(self.spec)
        self.contents = Contents(self.spec)
        self.depth = 2 if options.get("overlap", True) else 1
        self.patience = int(options.get("starvation_steps", 512)) + PATIENCE + self.spec.max_running_requests
        self.starvation = int(options.get("starvation_steps", 512))
        self.wanted: dict[int, int] = {}  # uid -> pages that its admission takes, until they are taken
        self.retracted_at = -1
        self._short: Violation | None = None  # an admission that can't be, unless the pages it takes say more

    def take(self, event: ev.Line) -> None:
        """Check an event, then let it happen."""
        if self._short is not None and not isinstance(event, ev.Match | ev.Evict | ev.Allocate):
            raise self._short
        look = getattr(self, f"_{type(event).__name__.lower()}", None)
        if look is not None and not self.state.failed:
            look(event)
        self.state.apply(event)
        self.contents.apply(event, self.state)

    # ---- requests ------------------------------------------------------------------------------------

    def _add(self, event: ev.Add) -> None:
        if event.uid in self.state.open:
            _fail("reply", "the request was queued while it was open already", event)
        spec, longest = self.spec, len(event.prompt_ids) + event.max_tokens
        most = min(spec.max_seq_len, spec.num_pages * spec.page_size + 1)
        if not event.prompt_ids or longest > most:
            text = f"a request of {len(event.prompt_ids)} prompt tokens and {event.max_tokens} more was queued; "
            _fail("refused", text + f"at most {most} together, and not an empty prompt, can be served", event)

    def _match(self, event: ev.Match) -> None:
        state, size = self.state, self.spec.page_size
        req = self._request(event.uid, event)
        if req.slot >= 0:
            _fail("slot", f"takes a slot, and has slot {req.slot} already", event)
        self._expect(event.pages, CACHE, "matched", event)
        if event.tokens != len(req.tokens):
            _fail("row", f"is seated with {event.tokens} tokens; it has {len(req.tokens)}", event)
        if len(event.pages) * size >= event.tokens:
            text = f"all of its {event.tokens} tokens are matched: at least one must be computed"
            _fail("admission", text, event)
        self._own_prefix(req, event.pages, 0, "matched", event)
        self._no_older_is_late(req, event)
        locked = int((self.state.users[event.pages] == 0).sum())
        self.wanted[req.uid] = -(-event.tokens // size) - len(event.pages)
        room = state.count(FREE) + state.evictable - locked
        try:
            self._fits(sum(self.wanted.values()), room, event)
        except Violation as short:
            self._short = self._short or short

    def _no_older_is_late(self, req: Request, event: ev.Match) -> None:
        first = next((r for r in self.state.waiting() if r.uid not in self.wanted), None)
        if first is None or first is req or self.retracted_at == event.step:
            return
        left_out = event.step - first.queued
        if first.number < req.number and left_out >= self.starvation:
            _fail("starved", f"request {req.uid} is seated before it, which waits for {left_out} steps", event, first)

    def _fits(self, pages: int, room: int, event: Any, uid: int | None = None) -> None:
        if pages > room:
            text = f"the step takes {pages} whole pages, and only {room} are free or can be evicted"
            raise Violation("admission", text, step=event.step, uid=uid if uid is not None else event.uid)

    def _admit(self, event: ev.Admit) -> None:
        slot, state = event.req_pool_idx, self.state
        req = self._request(event.uid, event)
        if not 0 <= slot < self.spec.max_running_requests:
            _fail("slot", f"there are {self.spec.max_running_requests} slots", event, slot=slot)
        for other in state.running.values():
            if other.slot == slot:
                _fail("slot", f"the slot is request {other.uid}'s", event, req, slot=slot)
        for launch in state.unread:
            if slot in launch.batch.req_pool_indices:
                text = f"step {launch.batch.step}, which nobody has read, still has another's row in the slot"
                _fail("slot", text, event, req, slot=slot)

    def _retract(self, event: ev.Retract) -> None:
        req = self._request(event.uid, event)
        if req.slot < 0:
            _fail("retraction", "is retracted, and does not run", event)
        self.retracted_at = event.step
        if len(self.state.running) > 1 and req is min(self.state.running.values(), key=lambda r: r.number):
            _fail("retraction", "the oldest of those that run is retracted", event)
        self._left_nothing(event)

    def _finish(self, event: ev.Finish) -> None:
        req = self._request(event.uid, event)
        if event.finish_reason == "error":
            return
        self._left_nothing(event)
        if event.finish_reason == "length" and req.output < req.added.max_tokens:
            _fail("reply", f"ended by length after {req.output} of {req.added.max_tokens} tokens", event)

    def _left_nothing(self, event: ev.Retract | ev.Finish) -> None:
        lost = np.flatnonzero(self.state.owner == event.uid)
        if len(lost):
            _fail("whole", "the request has left its slot and never gave the page back", event, page=int(lost[0]))

    def _end(self, event: ev.End) -> None:
        if self.state.open:
            uid = next(iter(self.state.open))
            text = f"the scheduler ended, and {len(self.state.open)} requests, this the first, have no final reply"
            raise Violation("reply", text, step=event.step, uid=uid)

    # ---- pages ---------------------------------------------------------------------------------------

    def _allocate(self, event: ev.Allocate) -> None:
        for owner in set(event.owners):
            self.wanted.pop(owner, None)
            self._request(owner, event, uid=owner)
        for owner, page in zip(event.owners, event.pages, strict=True):
            if self._owner(page) != FREE:
                _fail("owner", f"is given a page that is {self._whose(page)}", event, uid=owner, page=page)
        self._once(event.pages, "given", event)

    def _evict(self, event: ev.Evict) -> None:
        self._expect(event.pages, CACHE, "evicted", event)
        self._once(event.pages, "evicted", event)
        for page in event.pages:
            if self.state.users[page]:
                users = [r.uid for r in self.state.running.values() if page in r.shared]
                _fail("owner", f"is evicted while requests {users} use it", event, page=page)

    def _cache(self, event: ev.Cache) -> None:
        req = self._request(event.uid, event)
        self._expect(event.pages, req.uid, "cached", event)
        self._expect([page for page in event.cached_pages if page not in set(event.pages)], CACHE, "matched", event)
        if event.start != len(req.shared):
            _fail("prefix", f"caches from page {event.start} on, but {len(req.shared)} are shared already", event)
        if (event.start + len(event.cached_pages)) * self.spec.page_size > min(req.computed, len(req.tokens)):
            _fail("prefix", f"caches more than the {req.computed} positions that it computed", event)
        self.contents.label(req, event)
        self._own_prefix(req, event.cached_pages, event.start, "held", event)

    def _own_prefix(self, req: Request, pages: Sequence[int], start: int, verb: str, event: Any) -> None:
        wrong = self.contents.foreign(req, pages, start)
        if wrong is not None:
            text = f"its page {wrong[0]} was {verb} in the cache, and that page holds {wrong[2]}"
            _fail("prefix", text, event, page=wrong[1])

    def _free(self, event: ev.Free) -> None:
        self._expect(event.pages, event.uid, "given back", event)
        self._once(event.pages, "given back", event)

    def _pool(self, event: ev.Pool) -> None:
        state = self.state
        for name, said, found in (
            ("free", event.free, state.count(FREE)),
            ("the cache's", event.cached, state.count(CACHE)),
            ("retiring", event.retiring, state.count(RETIRING)),
            ("the cache's and in nobody's use", event.evictable, state.evictable),
        ):
            if said != found:
                page = next((int(p) for p in np.flatnonzero((state.owner == CACHE) & (state.users == 0))), None)
                text = f"{said} pages are {name}, say the books; by the events there are {found}"
                if "use" in name and said < found:
                    text += ": a prefix is still locked, and nobody uses it"
                raise Violation("whole", text, step=event.step, page=page if "use" in name else None)
        lost = np.flatnonzero(state.owner >= 0)
        if state.idle and (len(lost) or state.users.any()):
            page = int(lost[0] if len(lost) else np.flatnonzero(state.users)[0])
            text = f"nothing runs, and the page is {self._whose(page)}, with {state.users[page]} users"
            raise Violation("whole", text, step=event.step, page=page)

    def _expect(self, pages: Sequence[int], owner: int, verb: str, event: Any) -> None:
        for page in pages:
            if self._owner(page) != owner:
                _fail("owner", f"a page is {verb} that is {self._whose(page)}", event, page=page)

    def _once(self, pages: Sequence[int], verb: str, event: Any) -> None:
        if len(set(pages)) < len(pages):
            page = next(p for p in pages if pages.count(p) > 1)
            _fail("owner", f"a page is {verb} twice at once", event, page=page)

    def _owner(self, page: int) -> int:
        return int(self.state.owner[page]) if 0 <= page < self.spec.num_pages else RETIRING - 9

    def _whose(self, page: int) -> str:
        owner = self._owner(page)
        if owner == RETIRING:
            after = next((step for step, pages in self.state.retiring if page in pages), None)
            return f"retiring: given back, and step {after} may still touch it"
        named = {FREE: "free", CACHE: "the cache's"}
        return named.get(owner, f"request {owner}'s" if owner >= 0 else f"none of the {self.spec.num_pages}")

    # ---- steps ---------------------------------------------------------------------------------------

    def _plan(self, event: ev.Plan) -> None:
        """A plan that was never launched: had it room?"""
        size, state = self.spec.page_size, self.state
        grow, last = 0, None
        for uid, _ in event.rows:
            req = state.running.get(uid)
            if req is None or req.computed < req.target:
                continue
            if req.computed >= int((state.table[req.slot] >= 0).sum()) * size:
                grow, last = grow + 1, uid
        room = state.count(FREE) + state.evictable
        seats = [uid for uid, _ in event.rows if uid in self.wanted]
        self._fits(sum(self.wanted.values()) + grow, room, event, seats[-1] if seats else last)

    def _batch(self, event: ev.Batch) -> None:
        state, spec = self.state, self.spec
        if event.step != state.launched + 1:
            raise Violation("stream", f"step {state.launched + 1} was due", step=event.step)
        if len(state.unread) >= self.depth:
            text = f"launched while {len(state.unread)} steps are unread; at most {self.depth} may be in flight"
            raise Violation("stream", text, step=event.step)
        for slot, column, page in zip(*event.page_table_updates, strict=True):
            if not (
                0 <= slot < spec.max_running_requests
                and 0 <= column < state.table.shape[1]
                and 0 <= page < spec.num_pages
            ):
                text = f"the table write (slot {slot}, column {column}) is out of its bounds"
                raise Violation("given-back", text, step=event.step, page=page)
        if len(set(event.req_pool_indices)) < len(event.req_pool_indices):
            raise Violation("slot", f"two rows have one slot: {event.req_pool_indices}", step=event.step)
        for uid, slot in zip(event.uids, event.req_pool_indices, strict=True):
            req = self._request(uid, event, uid=uid)
            if req.slot != slot:
                _fail("slot", f"its row is in slot {slot}, and it has slot {req.slot}", event, req, slot=slot)
        table = state.table.copy()
        for slot, column, page in zip(*event.page_table_updates, strict=True):
            table[slot, column] = page
        for i in range(len(event.uids)):
            self._row(event, i, table)
        self._nobody_starves(event)

    def _row(self, event: ev.Batch, i: int, table: Any) -> None:
        req = self.state.requests[event.uids[i]]
        start, count, size = event.num_computed_tokens[i], event.num_scheduled_tokens[i], self.spec.page_size
        end = start + count
        if start != req.computed:
            _fail("row", f"starts at position {start}; its last row ended before {req.computed}", event, req)
        if count < 1 or (i < event.num_decode and count != 1) or end > req.max_len - 1:
            text = f"computes {count} positions from {start} on; {req.max_len - 1} can be computed in all"
            _fail("row", text, event, req)
        if bool(event.sample[i]) != (end >= req.target):
            verb = "samples" if event.sample[i] else "samples nothing"
            _fail("row", f"{verb} after position {end - 1} of {req.target}", event, req)
        pages = table[req.slot, : -(-end // size)]
        shared = np.zeros(self.spec.num_pages, bool)
        shared[req.shared] = True
        if (pages < 0).any():
            column = int(np.flatnonzero(pages < 0)[0])
            _fail("given-back", f"its table has no page for positions from {column * size} on", event, req)
        owner = self.state.owner[pages]
        for at in np.flatnonzero((owner != req.uid) & ~((owner == CACHE) & shared[pages]))[:1]:
            page = int(pages[at])
            text = f"its table still names the page for positions from {int(at) * size} on, but it is "
            _fail("given-back", text + self._whose(page), event, req, page=page)
        for at in np.flatnonzero(owner[start // size :] != req.uid)[:1]:
            page = int(pages[start // size + at])
            _fail("owner", f"writes a page that is {self._whose(page)}", event, req, page=page)

    def _nobody_starves(self, event: ev.Batch) -> None:
        rows = set(event.uids)
        for req in self.state.running.values():
            left_out = event.step - req.last_step
            if req.uid not in rows and left_out > self.patience and req.computed < req.max_len - 1:
                _fail("starved", f"it runs, and had no row in {left_out} steps", event, req)

    def _done(self, event: ev.Done) -> None:
        if not self.state.unread or self.state.unread[0].batch.step != event.step:
            raise Violation("stream", "its result was read, and it was not the oldest unread step", step=event.step)
        launch = self.state.unread[0]
        batch = launch.batch
        self._unchanged(event, batch)
        gained = event.gained or [1] * len(event.tokens)
        for i, (uid, got) in enumerate(zip(batch.uids, gained, strict=True)):
            self._token(event, launch, i, uid, bool(got))
        wrong = self.contents.execute(launch, event)
        if wrong is not None:
            uid, page, position, text = wrong
            text = f"position {position} of its table reads {text}"
            raise Violation("prefix", text, step=event.step, uid=uid, page=page)

    def _unread(self, event: ev.Unread) -> None:
        for launch in self.state.unread:
            if launch.batch.step == event.step:
                self._unchanged(event, launch.batch)

    def _unchanged(self, event: ev.Done | ev.Unread, batch: ev.Batch) -> None:
        if event.sums != batch.sums:
            text = "the step was changed after its launch: one of its arrays is a view of the scheduler's state"
            raise Violation("stream", text, step=event.step)

    def _token(self, event: ev.Done, launch: Launch, i: int, uid: int, got: bool) -> None:
        req = self.state.requests[uid]
        here = req.seat == launch.seats[i] and not req.reason
        if got and not here:
            text = "keeps a token that was in flight when it lost its seat" if not req.reason else "gains a token"
            _fail("late-token" if not req.reason else "reply", text + (f" after its end ({req.reason})" if req.reason
                  else ""), event, req)  # fmt: skip
        if got and not launch.batch.sample[i]:
            _fail("late-token", "gains a token from a chunk that samples none", event, req)
        if got and req.output >= req.added.max_tokens:
            _fail("reply", f"gains more than its {req.added.max_tokens} tokens", event, req)
        if not got and here and launch.batch.sample[i]:
            _fail("late-token", "its row sampled a token, and it did not get it", event, req)

    # ---- words ---------------------------------------------------------------------------------------

    def _request(self, who: int, event: Any, uid: int | None = None) -> Request:
        req = self.state.open.get(who)
        if req is not None:
            return req
        ended = self.state.requests.get(who)
        text = f"the request had its final reply ({ended.reason})" if ended else "nobody sent this request"
        raise Violation("reply", text, step=event.step, uid=who)


def _fail(rule: str, text: str, event: Any, req: Request | None = None, **where: Any) -> NoReturn:
    uid = req.uid if req is not None else getattr(event, "uid", None)
    raise Violation(rule, text, **{"step": event.step, "uid": uid, **where})
