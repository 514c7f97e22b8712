"""The trace checker: verifies that a recorded run kept the promises of docs/architecture.md.

The checker looks at each event before it is applied, in the state that the earlier events left. This module knows what
must be true before each event. `State` knows how an event changes the state, and `Contents` knows what pages hold.
The check ends at the first broken rule, because later ones may be its consequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from minisgl.trace import events as ev
from minisgl.trace.contents import Contents
from minisgl.trace.read import Trace
from minisgl.trace.state import CACHE, FREE, RETIRING, InFlightStep, Request, State
from minisgl.trace.violation import Violation

__all__ = ["Checker", "check"]

STARVATION_SLACK_STEPS = 8
"""Steps for which a request may be left out beyond ``starvation_steps`` plus ``max_running_requests``.

Several starved requests can be forced into the same step, and then one of them may have to wait for the next step. A
waiting request may also wait until the results of launched steps are read, if younger requests were retracted for it.
"""


def check(trace: Trace) -> Violation | None:
    """Return the first violation of a rule in a trace, or None."""
    checker = Checker(trace)
    for number, event in enumerate(trace, 2):  # the header is line 1
        try:
            checker.process(event)
        except Violation as violation:
            violation.line = number
            return violation
    return None


class Checker:
    """Checks the events of a trace in order; `process` raises `Violation` at the first event that breaks a rule."""

    def __init__(self, trace: Trace):
        options = trace.header.options
        self.spec = trace.spec
        self.state = State(self.spec)
        self.contents = Contents(self.spec)
        self.max_in_flight = 2 if options.get("overlap", True) else 1
        self.starvation_steps = int(options.get("starvation_steps", 512))
        self.max_left_out = self.starvation_steps + STARVATION_SLACK_STEPS + self.spec.max_running_requests
        self.admission_pages: dict[int, int] = {}  # uid -> number of pages that its admission still has to allocate
        self.retracted_at = -1
        # A waiting request that fits beside the older requests, as (uid, step at which it began to wait), and the step
        # from which on it must be in the plan.
        self.must_start: tuple[tuple[int, int], int] | None = None
        # Violation of an admission that needs too many pages. Raised after the allocations of the step were checked,
        # because their violations are more specific.
        self._overcommitted: Violation | None = None

    def process(self, event: ev.Line) -> None:
        """Check an event, then apply it to the state. Raises `Violation`."""
        if self._overcommitted is not None and not isinstance(event, ev.Match | ev.Evict | ev.Allocate):
            raise self._overcommitted
        check_event = getattr(self, f"_{type(event).__name__.lower()}", None)
        if check_event is not None and (not self.state.failed or isinstance(event, ev.End)):
            check_event(event)
        self.state.apply(event)
        self.contents.apply(event, self.state)

    # ---- requests ------------------------------------------------------------------------------------

    def _add(self, event: ev.Add) -> None:
        if event.uid in self.state.requests:
            _fail("reply", "the request was queued again before it ended", event)
        spec, num_tokens = self.spec, len(event.prompt_ids) + event.max_tokens
        limit = min(spec.max_seq_len, spec.num_pages * spec.page_size + 1)
        if not event.prompt_ids or num_tokens > limit:
            text = f"a request of {len(event.prompt_ids)} prompt tokens and up to {event.max_tokens} output tokens was "
            _fail("invalid-request", text + f"queued; a request needs a prompt and at most {limit} tokens", event)

    def _match(self, event: ev.Match) -> None:
        state, size = self.state, self.spec.page_size
        req = self._request(event.uid, event)
        if req.req_pool_idx >= 0:
            text = f"the request is admitted, but it already runs in request-pool row {req.req_pool_idx}"
            _fail("request-pool", text, event)
        self._expect_owner(event.pages, CACHE, "matched", event)
        if event.num_tokens != len(req.token_ids):
            _fail(
                "row", f"the request is admitted with {event.num_tokens} tokens, but it has {len(req.token_ids)}", event
            )
        if len(event.pages) * size >= event.num_tokens:
            text = f"all {event.num_tokens} tokens of the request are cached; at least one token must be computed"
            _fail("admission", text, event)
        self._expect_own_prefix(req, event.pages, 0, event)
        self._expect_no_starved_request(req, event)
        newly_locked = int((self.state.ref_counts[event.pages] == 0).sum())
        self.admission_pages[req.uid] = -(-event.num_tokens // size) - len(event.pages)
        available = state.count(FREE) + state.num_evictable_pages - newly_locked
        try:
            self._expect_room(sum(self.admission_pages.values()), available, event)
        except Violation as violation:
            self._overcommitted = self._overcommitted or violation

    def _expect_no_starved_request(self, req: Request, event: ev.Match) -> None:
        """Raise `Violation` if an older request, which waits too long, should have been admitted before ``req``."""
        oldest = self.state.waiting()[0]
        if oldest is req or oldest.uid in self.admission_pages or self.retracted_at == event.step:
            return
        if event.priority < oldest.priority:
            return  # a more urgent request may go first; how long, `_expect_starved_request_admitted` checks
        left_out = event.step - oldest.queued_at_step
        if left_out >= self.starvation_steps and self._fits_beside_older(oldest):
            text = (
                f"request {req.uid} is admitted before this older request, which has waited for {left_out} steps and "
                "fits beside the running requests that arrived before it"
            )
            _fail("starvation", text, event, oldest)

    def _expect_starved_request_admitted(self, event: ev.Batch) -> None:
        """Raise `Violation` if the oldest waiting request is starved, although it fits beside the older requests."""
        oldest = next(iter(self.state.waiting()), None)
        if oldest is None or not self._fits_beside_older(oldest):
            self.must_start = None
            return
        waits = (oldest.uid, oldest.queued_at_step)
        if self.must_start is None or self.must_start[0] != waits:
            self.must_start = waits, max(event.step, oldest.queued_at_step + self.starvation_steps)
        late = event.step - self.must_start[1]
        patience = self.max_left_out - self.starvation_steps
        if len({req.priority for req in self.state.requests.values()}) > 1:
            patience += self.starvation_steps  # beside a more urgent request, it must be the oldest for that long
        if late > patience:
            left_out = event.step - oldest.queued_at_step
            text = f"the request has waited for {left_out} steps, and fits beside the requests that arrived before it"
            _fail("starvation", text, event, oldest)

    def _fits_beside_older(self, req: Request) -> bool:
        """Return whether a waiting request surely fits if all younger requests are retracted.

        The older requests count with all pages that they may ever need, and no page counts as shared. So the scheduler,
        which keeps a smaller reserve for them, must find that the request fits, too.
        """
        older = [other for other in self.state.running.values() if other.arrival < req.arrival]
        size = self.spec.page_size
        pages = -(-len(req.token_ids) // size) + sum(-(-(other.max_num_tokens - 1) // size) for other in older)
        return len(older) < self.spec.max_running_requests and pages <= self.spec.num_pages

    def _expect_room(self, pages: int, available: int, event: Any, uid: int | None = None) -> None:
        if pages > available:
            text = f"the step needs {pages} whole pages, but only {available} are free or evictable"
            raise Violation("admission", text, step=event.step, uid=uid if uid is not None else event.uid)

    def _admit(self, event: ev.Admit) -> None:
        idx, state = event.req_pool_idx, self.state
        req = self._request(event.uid, event)
        if not 0 <= idx < self.spec.max_running_requests:
            text = f"the request pool has only {self.spec.max_running_requests} rows"
            _fail("request-pool", text, event, req_pool_idx=idx)
        for other in state.running.values():
            if other.req_pool_idx == idx:
                text = f"the request-pool row belongs to request {other.uid}"
                _fail("request-pool", text, event, req, req_pool_idx=idx)
        for step in state.in_flight:
            if idx in step.batch.req_pool_indices:
                text = f"step {step.batch.step} is in flight, and uses this request-pool row for another request"
                _fail("request-pool", text, event, req, req_pool_idx=idx)

    def _retract(self, event: ev.Retract) -> None:
        req = self._request(event.uid, event)
        if req.req_pool_idx < 0:
            _fail("retraction", "the request is retracted, but it does not run", event)
        self.retracted_at = event.step
        if len(self.state.running) > 1 and req is min(self.state.running.values(), key=_urgency):
            waiting = self.state.waiting()
            if not any(_urgency(other) < _urgency(req) or self._overtaken(other, req) for other in waiting):
                first = "most urgent" if any(other.priority for other in self.state.requests.values()) else "oldest"
                _fail("retraction", f"the {first} running request is retracted", event)
        self._expect_pages_retired(event)

    def _overtaken(self, waiting: Request, running: Request) -> bool:
        """Return whether ``waiting`` is starved, and arrived before ``running``, which then may have to wait for it."""
        left_out = self.state.next_step_id - waiting.queued_at_step
        return waiting.arrival < running.arrival and left_out >= self.starvation_steps

    def _finish(self, event: ev.Finish) -> None:
        req = self._request(event.uid, event)
        if event.finish_reason == "error":
            return
        self._expect_pages_retired(event)
        if event.finish_reason == "length" and req.num_output_tokens < req.added.max_tokens:
            text = (
                f"the request ended with reason length after {req.num_output_tokens} of {req.added.max_tokens} tokens"
            )
            _fail("reply", text, event)

    def _expect_pages_retired(self, event: ev.Retract | ev.Finish) -> None:
        lost = np.flatnonzero(self.state.owner == event.uid)
        if len(lost):
            _fail("page-count", "the request stopped running, but never retired the page", event, page=int(lost[0]))

    def _end(self, event: ev.End) -> None:
        if self.state.requests:
            uid = next(iter(self.state.requests))
            text = f"the scheduler ended, and {len(self.state.requests)} requests, first this one, have no final reply"
            raise Violation("reply", text, step=event.step, uid=uid)

    # ---- pages ---------------------------------------------------------------------------------------

    def _allocate(self, event: ev.Allocate) -> None:
        for owner in set(event.owners):
            self.admission_pages.pop(owner, None)
            self._request(owner, event)
        for owner, page in zip(event.owners, event.pages, strict=True):
            if self._owner(page) != FREE:
                text = f"the page is to be allocated to the request, but it is {self._describe_owner(page)}"
                _fail("page-owner", text, event, uid=owner, page=page)
        self._expect_distinct(event.pages, "allocated", event)

    def _evict(self, event: ev.Evict) -> None:
        self._expect_owner(event.pages, CACHE, "evicted", event)
        self._expect_distinct(event.pages, "evicted", event)
        for page in event.pages:
            if self.state.ref_counts[page]:
                users = [r.uid for r in self.state.running.values() if page in r.cached_pages]
                _fail("page-owner", f"the page is evicted while requests {users} use it", event, page=page)

    def _cache(self, event: ev.Cache) -> None:
        req = self._request(event.uid, event)
        self._expect_owner(event.pages, req.uid, "inserted into the cache", event)
        old_pages = [page for page in event.cached_pages if page not in set(event.pages)]
        self._expect_owner(old_pages, CACHE, "matched", event)
        if event.start != len(req.cached_pages):
            text = f"pages from number {event.start} on are inserted, but {len(req.cached_pages)} are cached already"
            _fail("prefix", text, event)
        num_inserted = (event.start + len(event.cached_pages)) * self.spec.page_size
        if num_inserted > min(req.num_computed_tokens, len(req.token_ids)):
            text = f"{num_inserted} positions are inserted into the cache, but {req.num_computed_tokens} were computed"
            _fail("prefix", text, event)
        self.contents.insert(req, event)
        self._expect_own_prefix(req, event.cached_pages, event.start, event)

    def _expect_own_prefix(self, req: Request, pages: Sequence[int], start: int, event: Any) -> None:
        """Raise `Violation` if a cached page holds the KV of tokens that are not the request's."""
        wrong = self.contents.find_wrong_page(req, pages, start)
        if wrong is not None:
            number, page, content = wrong
            text = f"the cache matched this page to page {number} of the request, but the page holds {content}"
            _fail("prefix", text, event, page=page)

    def _free(self, event: ev.Free) -> None:
        self._expect_owner(event.pages, event.uid, "retired", event)
        self._expect_distinct(event.pages, "retired", event)

    def _pool(self, event: ev.Pool) -> None:
        state = self.state
        for name, counted, found in (
            ("free", event.free, state.count(FREE)),
            ("cached", event.cached, state.count(CACHE)),
            ("retiring", event.retiring, state.count(RETIRING)),
            ("evictable", event.evictable, state.num_evictable_pages),
        ):
            if counted != found:
                text = f"the scheduler counts {counted} {name} pages; by the events there are {found}"
                page = None
                if name == "evictable":
                    page = next(
                        (int(p) for p in np.flatnonzero((state.owner == CACHE) & (state.ref_counts == 0))), None
                    )
                    if counted < found:
                        text += ": a prefix is still locked, but no request uses it"
                raise Violation("page-count", text, step=event.step, page=page)
        lost = np.flatnonzero(state.owner >= 0)
        if state.idle and (len(lost) or state.ref_counts.any()):
            page = int(lost[0] if len(lost) else np.flatnonzero(state.ref_counts)[0])
            text = (
                f"no request runs, but the page is {self._describe_owner(page)} and has {state.ref_counts[page]} users"
            )
            raise Violation("page-count", text, step=event.step, page=page)

    def _expect_owner(self, pages: Sequence[int], owner: int, verb: str, event: Any) -> None:
        for page in pages:
            if self._owner(page) != owner:
                _fail(
                    "page-owner", f"the page is to be {verb}, but it is {self._describe_owner(page)}", event, page=page
                )

    def _expect_distinct(self, pages: Sequence[int], verb: str, event: Any) -> None:
        if len(set(pages)) < len(pages):
            page = next(p for p in pages if pages.count(p) > 1)
            _fail("page-owner", f"the page is {verb} twice at once", event, page=page)

    def _owner(self, page: int) -> int:
        """Return the owner of a page, or a number that is no owner if the pool has no such page."""
        return int(self.state.owner[page]) if 0 <= page < self.spec.num_pages else RETIRING - 9

    def _describe_owner(self, page: int) -> str:
        owner = self._owner(page)
        if owner == RETIRING:
            step = next((step for step, pages in self.state.retiring if page in pages), None)
            return f"retiring: step {step} may still access it"
        if owner >= 0:
            return f"owned by request {owner}"
        return {FREE: "free", CACHE: "owned by the cache"}.get(owner, f"not one of the {self.spec.num_pages} pages")

    # ---- steps ---------------------------------------------------------------------------------------

    def _plan(self, event: ev.Plan) -> None:
        """Raise `Violation` if a plan that was never launched needed more pages than were available."""
        size, state = self.spec.page_size, self.state
        num_decode_pages, last = 0, None
        for uid, _ in event.rows:
            req = state.running.get(uid)
            if req is None or req.num_computed_tokens < req.num_prefill_tokens:
                continue
            if req.num_computed_tokens >= int((state.page_table[req.req_pool_idx] >= 0).sum()) * size:
                num_decode_pages, last = num_decode_pages + 1, uid
        available = state.count(FREE) + state.num_evictable_pages
        admitted = [uid for uid, _ in event.rows if uid in self.admission_pages]
        needed = sum(self.admission_pages.values()) + num_decode_pages
        self._expect_room(needed, available, event, admitted[-1] if admitted else last)

    def _batch(self, event: ev.Batch) -> None:
        state, spec = self.state, self.spec
        if event.step != state.next_step_id:
            raise Violation("stream", f"the next step has number {state.next_step_id}", step=event.step)
        if len(state.in_flight) >= self.max_in_flight:
            text = f"the step is launched while {len(state.in_flight)} are in flight; the limit is {self.max_in_flight}"
            raise Violation("stream", text, step=event.step)
        for idx, column, page in zip(*event.page_table_updates, strict=True):
            if not (
                0 <= idx < spec.max_running_requests
                and 0 <= column < state.page_table.shape[1]
                and 0 <= page < spec.num_pages
            ):
                text = f"the write of page {page} to row {idx}, column {column} of the page table is out of bounds"
                raise Violation("page-table", text, step=event.step, page=page)
        if len(set(event.req_pool_indices)) < len(event.req_pool_indices):
            text = f"two rows of the step have the same request-pool row: {event.req_pool_indices}"
            raise Violation("request-pool", text, step=event.step)
        for uid, idx in zip(event.uids, event.req_pool_indices, strict=True):
            req = self._request(uid, event)
            if req.req_pool_idx != idx:
                text = f"the step uses request-pool row {idx} for the request, which has row {req.req_pool_idx}"
                _fail("request-pool", text, event, req, req_pool_idx=idx)
        page_table = state.page_table.copy()
        for idx, column, page in zip(*event.page_table_updates, strict=True):
            page_table[idx, column] = page
        for i in range(len(event.uids)):
            self._row(event, i, page_table)
        wrong = self.contents.find_wrong_state(event, state)
        if wrong is not None:
            _fail("state", wrong[1], event, wrong[0])
        self._expect_no_starved_row(event)
        self._expect_starved_request_admitted(event)

    def _row(self, event: ev.Batch, i: int, page_table: Any) -> None:
        """Check row ``i`` of a step; ``page_table`` includes the writes of the step."""
        req = self.state.all_requests[event.uids[i]]
        start, count, size = event.num_computed_tokens[i], event.num_scheduled_tokens[i], self.spec.page_size
        end, last_end = start + count, start + event.rounds * count  # of the first round, and of all rounds
        if start != req.num_computed_tokens:
            text = f"the row starts at position {start}, but the request's last row ended at {req.num_computed_tokens}"
            _fail("row", text, event, req)
        if count < 1 or (i < event.num_decode and count != 1) or last_end > req.max_num_tokens - 1:
            limit = req.max_num_tokens - 1
            _fail(
                "row",
                f"the row computes {last_end - start} positions from {start} on; the limit is {limit}",
                event,
                req,
            )
        num_sampled = event.num_sampled_tokens[i]
        if (num_sampled > 0) != (end >= req.num_prefill_tokens):
            verb = "samples a token" if num_sampled else "samples no token"
            text = (
                f"the row {verb} after position {end - 1}; the request has {req.num_prefill_tokens} tokens to prefill"
            )
            _fail("row", text, event, req)
        pages = page_table[req.req_pool_idx, : -(-last_end // size)]
        is_locked = np.zeros(self.spec.num_pages, bool)
        is_locked[req.cached_pages] = True
        if (pages < 0).any():
            column = int(np.flatnonzero(pages < 0)[0])
            _fail(
                "page-table", f"the request's page table has no page for positions from {column * size} on", event, req
            )
        owner = self.state.owner[pages]
        for column in np.flatnonzero((owner != req.uid) & ~((owner == CACHE) & is_locked[pages]))[:1]:
            page = int(pages[column])
            text = f"the request's page table points to this page for positions from {int(column) * size} on"
            text += f", but the page is {self._describe_owner(page)}"
            _fail("page-table", text, event, req, page=page)
        for column in np.flatnonzero(owner[start // size :] != req.uid)[:1]:
            page = int(pages[start // size + column])
            text = f"the row writes to the page, which is {self._describe_owner(page)}"
            _fail("page-owner", text, event, req, page=page)

    def _expect_no_starved_row(self, event: ev.Batch) -> None:
        uids = set(event.uids)
        for req in self.state.running.values():
            left_out = event.step - req.last_step
            unfinished = req.num_computed_tokens < req.max_num_tokens - 1
            if req.uid not in uids and left_out > self.max_left_out and unfinished:
                _fail("starvation", f"the request runs, but had no row in the last {left_out} steps", event, req)

    def _done(self, event: ev.Done) -> None:
        if not self.state.in_flight or self.state.in_flight[0].batch.step != event.step:
            raise Violation("stream", "the result was read, but this is not the oldest step in flight", step=event.step)
        step = self.state.in_flight[0]
        batch = step.batch
        self._expect_unchanged(event, batch)
        for i, (uid, gained) in enumerate(zip(batch.uids, event.gained, strict=True)):
            self._token(event, step, i, uid, bool(gained))
        wrong = self.contents.execute(step, event)
        if wrong is not None:
            uid, page, position, content = wrong
            text = f"position {position} of the request's page table reads {content}"
            raise Violation("prefix", text, step=event.step, uid=uid, page=page)

    def _unread(self, event: ev.Unread) -> None:
        for step in self.state.in_flight:
            if step.batch.step == event.step:
                self._expect_unchanged(event, step.batch)

    def _expect_unchanged(self, event: ev.Done | ev.Unread, batch: ev.Batch) -> None:
        if event.checksum != batch.checksum:
            text = "the step was changed after its launch: one of its arrays is a view of the scheduler's state"
            raise Violation("stream", text, step=event.step)

    def _token(self, event: ev.Done, step: InFlightStep, i: int, uid: int, gained: bool) -> None:
        """Check whether the request of row ``i`` rightly gained, or did not gain, the token of the row."""
        req = self.state.all_requests[uid]
        same_admission = req.admission_order == step.admission_orders[i] and not req.finish_reason
        width = step.batch.num_sampled_tokens[i]
        sampled = width * step.batch.rounds
        run = event.run(i, bool(sampled))
        if gained and req.finish_reason:
            _fail("reply", f"the request gains a token after its end ({req.finish_reason})", event, req)
        if gained and not same_admission:
            _fail("late-token", "the request keeps a token that was in flight when it was retracted", event, req)
        if gained and not sampled:
            _fail("late-token", "the request gains a token from a chunk that samples no token", event, req)
        if gained and not 1 <= len(run) <= sampled:
            _fail("row", f"the row gives its request {len(run)} tokens, and samples {sampled}", event, req)
        if gained and step.batch.rounds > 1:
            by_round = event.rounds[i] if event.rounds is not None else []
            possible = len(by_round) <= step.batch.rounds and all(1 <= n <= width for n in by_round)
            if not possible or sum(by_round) != len(run):
                text = f"the rounds of the row give {by_round} tokens, of at most {width} each; its run has {len(run)}"
                _fail("row", text, event, req)
        if gained and req.num_output_tokens + len(run) > req.added.max_tokens:
            _fail("reply", f"the request gains more than its {req.added.max_tokens} tokens", event, req)
        if not gained and same_admission and sampled:
            _fail("late-token", "the row sampled a token, but the request did not gain the token", event, req)

    # ---- errors --------------------------------------------------------------------------------------

    def _request(self, uid: int, event: Any) -> Request:
        """Return a request that has not ended. Raises `Violation` for every other uid."""
        req = self.state.requests.get(uid)
        if req is not None:
            return req
        ended = self.state.all_requests.get(uid)
        text = f"the request has had its final reply ({ended.finish_reason})" if ended else "no such request was added"
        raise Violation("reply", text, step=event.step, uid=uid)


def _urgency(req: Request) -> tuple[int, int]:
    return req.priority, req.arrival


def _fail(rule: str, text: str, event: Any, req: Request | None = None, **location: Any) -> NoReturn:
    uid = req.uid if req is not None else getattr(event, "uid", None)
    raise Violation(rule, text, **{"step": event.step, "uid": uid, **location})
