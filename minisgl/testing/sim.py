"""The simulated engine: `Engine` without a model, which checks that each row reads exactly its own prefix.

It keeps for each KV slot the hash of the token prefix that was written there, derives what it expects from the
requests alone (`minisgl.testing.truth`), and looks at a step's arrays only when its result is asked for: the latest
that the stream rule allows. It knows neither the scheduler nor the cache nor the ledger, and needs no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from minisgl.core import I32, I64, PENDING, Admission, EngineDeadError, EngineSpec, Step, StepResult
from minisgl.testing.form import check_form, digest
from minisgl.testing.truth import Ask, Truth, stop_ids
from minisgl.testing.violation import SimViolation

__all__ = ["SimCounts", "SimEngine"]

_NOBODY, _MANY = -1, -2


@dataclass
class SimCounts:
    """What the engine computed so far."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0  # positions computed
    prompt_tokens: int = 0  # of them, positions of a prompt
    recomputed: int = 0  # of them, positions that the same request had computed before (it was retracted)
    max_rows: int = 0
    max_tokens: int = 0  # positions computed in one step
    seats: dict[int, int] = field(default_factory=dict)  # uid -> times that it took a slot
    computed_by: dict[int, int] = field(default_factory=dict)  # uid -> positions computed


@dataclass
class _Occupant:
    """Who sits in a slot. ``serial`` tells seats apart: a request that comes back has another one."""

    serial: int
    uid: int
    end: int = -1  # positions whose KV is there; -1: no row yet
    last_token: int = -1
    last_position: int = -1  # of last_token
    ended_by: int = -1  # the step whose result ended the request


@dataclass
class _Launched:
    step: Step
    digest: bytes
    read: int  # results that were read before the launch


@dataclass
class _Footprint:
    """What an executed step touched, for as long as a later step was launched before its result was read."""

    slots: I64  # [max_slots] serial of the seat that had a row, or _NOBODY
    pages: I64  # [num_pages] serial of the seat that touched it, _NOBODY or _MANY


@dataclass
class _Row:
    index: int
    slot: int
    seat: _Occupant
    truth: Truth
    start: int
    end: int
    tokens: I32
    sample: bool
    pages: I32  # of positions 0 … end - 1

    def at(self, step: int, **more: int) -> dict[str, Any]:
        return {"step": step, "row": self.index, "uid": self.seat.uid, "slot": self.slot, **more}


class SimEngine:
    """An engine whose tokens are hashes of their prefixes.

    ``requests`` maps uid to what its client asked; it is looked up when a step seats the uid, so it may grow.
    ``depth`` is how many steps may be unread: 2 with overlap, 1 without. Launching step ``dies_at`` raises
    `EngineDeadError` (with ``dies_late``, reading it does). Raises `SimViolation` where a step breaks a rule.
    """

    def __init__(
        self,
        spec: EngineSpec,
        requests: Mapping[int, Ask],
        *,
        eos_ids: Collection[int] = (),
        depth: int = 2,
        dies_at: int | None = None,
        dies_late: bool = False,
    ):
        self.spec, self.requests, self.depth = spec, requests, depth
        self.dies_at, self.dies_late = dies_at, dies_late
        self.eos_ids = frozenset(eos_ids)
        self.counts = SimCounts()
        self.closed = False
        columns = -(-spec.max_seq_len // spec.page_size)
        self._kv = np.zeros((spec.num_pages, spec.page_size), np.uint64)
        self._writer = np.full(spec.num_pages, _NOBODY, np.int64)  # serial of the seat that wrote a page last
        self._written = np.full(spec.num_pages, -1, np.int64)  # in which step
        self._table = np.full((spec.max_running_requests, columns), -1, np.int32)
        self._mapped = np.full(
            (spec.max_running_requests, columns), -1, np.int64
        )  # the step that wrote the table entry
        self._seats: list[_Occupant | None] = [None] * spec.max_running_requests
        self._truths: dict[int, Truth] = {}
        self._seeds: dict[int, int] = {}
        self._newest: dict[int, int] = {}  # uid -> position of its newest sampled token
        self._reached: dict[int, int] = {}  # uid -> positions computed at least once
        self._unread: deque[_Launched] = deque()
        self._footprints: dict[int, _Footprint] = {}
        self._next_id = self._read = self._serial = 0

    # ---- the protocol ------------------------------------------------------------------------------

    def launch(self, step: Step) -> None:
        """Queue a step. Only its number is looked at now; the rest when its result is asked for."""
        self._alive()
        if step.id == self.dies_at and not self.dies_late:
            raise EngineDeadError(f"the simulated device failed at the launch of step {step.id}")
        if step.id != self._next_id:
            raise SimViolation("step-id", f"step {self._next_id} was due", step=step.id)
        if len(self._unread) >= self.depth:
            text = f"launched while {len(self._unread)} steps are unread; at most {self.depth} may be in flight"
            raise SimViolation("unread-steps", text, step=step.id)
        self._next_id += 1
        self._unread.append(_Launched(step, digest(step), self._read))

    def result(self) -> StepResult:
        """Execute the oldest unread step, check it, and return what it sampled: tokens [rows, 1]."""
        self._alive()
        if not self._unread:
            raise SimViolation("unread-steps", "a result was asked for, but every launched step was read")
        launched = self._unread.popleft()
        step = launched.step
        if step.id == self.dies_at:
            raise EngineDeadError(f"the simulated device failed in step {step.id}")
        if digest(step) != launched.digest:
            text = "the step was changed after its launch: one of its arrays is a view of the scheduler's state"
            raise SimViolation("step-changed", text, step=step.id)
        check_form(step, self.spec)
        self._apply_seats(step, launched.read)
        self._apply_table(step)
        rows = self._rows(step)
        self._check_owners(step, rows, launched.read)
        for row in rows:
            self._check_row(step.id, row, launched.read)
        tokens = np.zeros((step.rows, 1), np.int32)
        for row in rows:
            tokens[row.index, 0] = self._compute(step.id, row)
        self._count(rows)
        self._read += 1
        self._footprints.pop(step.id - self.depth, None)
        return StepResult(step.id, tokens, step.sample.astype(np.int32))

    def close(self) -> None:
        """No launch or result is allowed after it."""
        self.closed = True

    @property
    def unread(self) -> int:
        """Steps launched and not read yet."""
        return len(self._unread)

    def pages_of(self, uid: int) -> I32:
        """The pages that the page table names for a seated request, by position; as of the last result."""
        for slot, seat in enumerate(self._seats):
            if seat is not None and seat.uid == uid:
                return self._table[slot][self._table[slot] >= 0]
        raise KeyError(f"request {uid} has no slot")

    def _alive(self) -> None:
        if self.closed:
            raise EngineDeadError("the simulated engine was closed")

    # ---- executing a step ----------------------------------------------------------------------------

    def _apply_seats(self, step: Step, read: int) -> None:
        taken: set[int] = set()
        for seat in step.admissions:
            uid, slot = seat.uid, seat.req_pool_idx

            def fail(rule: str, text: str, seat: Admission = seat) -> NoReturn:
                raise SimViolation(rule, text, step=step.id, uid=seat.uid, slot=seat.req_pool_idx)

            if not 0 <= slot < self.spec.max_running_requests:
                fail("seat", f"there are {self.spec.max_running_requests} slots")
            if slot in taken:
                fail("seat", "the step seats two requests in this slot")
            if uid not in self.requests:
                fail("seat", "nobody sent this request")
            ask = self.requests[uid]
            if seat.params != ask.params:
                fail("seat", f"its parameters are {ask.params}, the seat has {seat.params}")
            if self._seeds.setdefault(uid, seat.seed) != seat.seed:
                fail("seat", f"its seed was {self._seeds[uid]} at its first seat and is {seat.seed} now")
            for unread in range(read, step.id):
                serial = self._footprints[unread].slots[slot]
                if serial != _NOBODY:
                    fail("slot-in-flight", f"step {unread}, unread at the launch, has a row of another seat in it")
            taken.add(slot)
            truth = self._truths.setdefault(uid, Truth(ask, self.spec.vocab_size))
            self._check_history(step, seat, truth)
            self._seats = [None if o is not None and o.uid == uid else o for o in self._seats]
            self._seats[slot] = _Occupant(self._serial, uid)
            self._serial += 1
            self._table[slot] = -1
            self._mapped[slot] = -1
            self.counts.seats[uid] = self.counts.seats.get(uid, 0) + 1

    def _check_history(self, step: Step, seat: Admission, truth: Truth) -> None:
        """Penalties count the tokens before the step: prompt, and the output that was kept (all but what was
        discarded because it was in flight at a retraction)."""
        if not seat.params.needs_history:
            return
        sampled = self._newest.get(seat.uid, truth.prompt_len - 1) + 1
        prompt, output = seat.prompt_ids, seat.output_ids
        if prompt is None or not np.array_equal(prompt, truth.tokens[: truth.prompt_len]):
            text = "a penalty is on, and the seat's prompt is not the request's"
            raise SimViolation("seat", text, step=step.id, uid=seat.uid, slot=seat.req_pool_idx)
        length = truth.prompt_len + (0 if output is None else len(output))
        if not sampled - (self.depth - 1) <= length <= sampled or not np.array_equal(
            output if output is not None else [], truth.tokens[truth.prompt_len : length]
        ):
            text = f"a penalty is on, and the seat's output is not the {sampled - truth.prompt_len} tokens so far"
            raise SimViolation("seat", text, step=step.id, uid=seat.uid, slot=seat.req_pool_idx)

    def _apply_table(self, step: Step) -> None:
        slots, columns, pages = step.page_table_updates
        self._table[slots, columns] = pages
        self._mapped[slots, columns] = step.id

    def _rows(self, step: Step) -> list[_Row]:
        rows = []
        offset = 0
        for index in range(step.rows):
            slot, start, count = (
                int(step.req_pool_indices[index]),
                int(step.num_computed_tokens[index]),
                int(step.num_scheduled_tokens[index]),
            )
            seat = self._seats[slot]
            if seat is None:
                raise SimViolation("seat", "nobody sits in this slot", step=step.id, row=index, slot=slot)
            truth, end = self._truths[seat.uid], start + count
            limit = min(truth.max_len - 1, self.spec.max_seq_len)  # nobody needs the last token's KV
            where = {"step": step.id, "row": index, "uid": seat.uid, "slot": slot}
            if start < 0 or end > limit:
                text = f"positions {start} to {end - 1} are computed; the last one allowed is {limit - 1}"
                raise SimViolation("position", text, **where)
            pages = self._table[slot, : -(-end // self.spec.page_size)]
            for column in np.flatnonzero(pages < 0)[:1]:
                position = int(column) * self.spec.page_size
                text = f"page column {column} was not written since the request took the slot"
                raise SimViolation("table-missing", text, **where, position=position)
            tokens = step.input_ids[offset : offset + count]
            rows.append(_Row(index, slot, seat, truth, start, end, tokens, bool(step.sample[index]), pages))
            offset += count
        return rows

    def _check_owners(self, step: Step, rows: list[_Row], read: int) -> None:
        """Nobody else touches a page that a row writes, neither in this step nor in one that was still in flight
        when this one was launched; and no page of a row was written by another since the row's table named it."""
        size = self.spec.page_size
        touches = np.bincount(np.concatenate([row.pages for row in rows]), minlength=self.spec.num_pages)
        footprint = _Footprint(
            np.full(self.spec.max_running_requests, _NOBODY, np.int64), np.full(self.spec.num_pages, _NOBODY, np.int64)
        )
        for row in rows:
            serial, first = row.seat.serial, row.start // size
            written = row.pages[first:]
            for i in np.flatnonzero(touches[written] > 1)[:1]:
                self._fail_shared(step.id, row, first + int(i), rows)
            for unread in range(read, step.id):
                toucher = self._footprints[unread].pages[written]
                for i in np.flatnonzero((toucher != _NOBODY) & (toucher != serial))[:1]:
                    text = f"writes a page that step {unread}, unread at the launch, touches for another"
                    place = row.at(step.id, page=int(written[i]), position=(first + int(i)) * size)
                    raise SimViolation("page-in-flight", text, **place)
            mapped = self._mapped[row.slot, : len(row.pages)]
            stale = (self._writer[row.pages] != serial) & (self._written[row.pages] >= mapped)
            for i in np.flatnonzero(stale & (self._writer[row.pages] != _NOBODY))[:1]:
                page = int(row.pages[i])
                text = (
                    f"its table names the page since step {mapped[i]}, but step {self._written[page]} wrote it for "
                    "another: it was given back while the table still pointed to it"
                )
                raise SimViolation("page-given-back", text, **row.at(step.id, page=page, position=int(i) * size))
            before = footprint.pages[row.pages]
            footprint.pages[row.pages] = np.where(before == _NOBODY, serial, _MANY)
            footprint.slots[row.slot] = serial
        self._footprints[step.id] = footprint

    def _fail_shared(self, step: int, row: _Row, column: int, rows: list[_Row]) -> NoReturn:
        """``row`` writes a page that another row, or another column of its own, has too. Whose fault is it?"""
        size, page = self.spec.page_size, int(row.pages[column])
        other = next((r for r in rows if r is not row and page in r.pages), None)
        if other is None:
            text = "writes a page that stands twice in its table"
            raise SimViolation("page-shared", text, **row.at(step, page=page, position=column * size))
        theirs = int(np.flatnonzero(other.pages == page)[0])
        since = int(self._mapped[other.slot, theirs])
        if since < self._mapped[row.slot, column]:
            thief = f"row {row.index} (request {row.seat.uid})"
            text = f"its table names the page since step {since}, but {thief} was given it and writes it"
            raise SimViolation("page-given-back", text, **other.at(step, page=page, position=theirs * size))
        text = f"writes a page that row {other.index} (request {other.seat.uid}) has too"
        raise SimViolation("page-shared", text, **row.at(step, page=page, position=column * size))

    def _check_row(self, step: int, row: _Row, read: int) -> None:
        seat, truth, start, end = row.seat, row.truth, row.start, row.end
        if 0 <= seat.ended_by < read:
            text = f"the result of step {seat.ended_by}, read before the launch, ended the request"
            raise SimViolation("row-after-end", text, **row.at(step))
        if seat.end >= 0 and start != seat.end:
            text = f"starts at {start}, but its last row in this slot ended before {seat.end}"
            raise SimViolation("start", text, **row.at(step, position=start))
        newest = self._newest.get(seat.uid, truth.prompt_len - 1)
        truth.extend(end)
        self._check_tokens(step, row, newest)
        if start:
            kv = self._kv[row.pages[: -(-start // self.spec.page_size)]].reshape(-1)[:start]
            for position in np.flatnonzero(kv != truth.hashes[1 : start + 1])[:1]:
                page = int(row.pages[position // self.spec.page_size])
                text = f"reads {self._whose(int(kv[position]))} where its own prefix should be"
                raise SimViolation("kv-content", text, **row.at(step, page=page, position=int(position)))
        # A token that was in flight when its request was retracted is discarded, so it may be sampled again.
        if row.sample and not newest - (self.depth - 1) < end <= newest + 1:
            text = f"samples after position {end - 1}, but the newest token of the request is at {newest}"
            raise SimViolation("sample", text, **row.at(step, position=end - 1))
        if not row.sample and end > newest:
            text = "computes the newest token of the request, and samples nothing"
            raise SimViolation("sample", text, **row.at(step, position=end - 1))

    def _check_tokens(self, step: int, row: _Row, newest: int) -> None:
        seat, start = row.seat, row.start
        tokens = row.tokens
        if len(tokens) == 1 and tokens[0] == PENDING:
            if seat.last_position != start:
                held = f"the token of position {seat.last_position}" if seat.last_position >= 0 else "no token"
                text = f"takes what its slot sampled last as position {start}, but the slot holds {held}"
                raise SimViolation("input-token", text, **row.at(step, position=start))
            tokens = np.asarray([seat.last_token], np.int32)
        expected = row.truth.tokens[start : row.end]
        for i in np.flatnonzero(tokens != expected)[:1]:
            text = f"input token {tokens[i]} instead of {expected[i]}"
            raise SimViolation("input-token", text, **row.at(step, position=start + int(i)))
        if row.end > newest + 1:
            text = f"computes position {row.end - 1}, but the newest token of the request is at {newest}"
            raise SimViolation("input-token", text, **row.at(step, position=row.end - 1))

    def _compute(self, step: int, row: _Row) -> int:
        """Write the row's KV and sample its token (0 where it samples none)."""
        seat, truth, start, end = row.seat, row.truth, row.start, row.end
        size = self.spec.page_size
        positions = np.arange(start, end)
        pages = row.pages[positions // size]
        self._kv[pages, positions % size] = truth.hashes[start + 1 : end + 1]
        self._writer[pages] = seat.serial
        self._written[pages] = step
        seat.end = end
        if not row.sample:
            return 0
        token = truth[end]
        seat.last_token, seat.last_position = token, end
        self._newest[seat.uid] = max(end, self._newest.get(seat.uid, -1))
        if end + 1 >= truth.max_len or token in stop_ids(truth.params, self.eos_ids):
            seat.ended_by = step if seat.ended_by < 0 else seat.ended_by
        return token

    # ---- words and counts ---------------------------------------------------------------------------

    def _whose(self, content: int) -> str:
        if content == 0:
            return "a position that was never written"
        for uid, truth in self._truths.items():
            for length in np.flatnonzero(truth.hashes[1 : truth.known + 1] == np.uint64(content))[:1]:
                return f"the KV of request {uid} at position {length}"
        return "KV that belongs to no request's prefix"

    def _count(self, rows: list[_Row]) -> None:
        counts = self.counts
        tokens = sum(row.end - row.start for row in rows)
        counts.steps += 1
        counts.rows += len(rows)
        counts.tokens += tokens
        counts.max_rows = max(counts.max_rows, len(rows))
        counts.max_tokens = max(counts.max_tokens, tokens)
        for row in rows:
            uid, done = row.seat.uid, counts.computed_by
            done[uid] = done.get(uid, 0) + row.end - row.start
            reached = self._reached.get(uid, 0)
            counts.prompt_tokens += max(0, min(row.end, row.truth.prompt_len) - row.start)
            counts.recomputed += max(0, min(row.end, reached) - row.start)
            self._reached[uid] = max(row.end, reached)
