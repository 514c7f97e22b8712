"""The simulated engine: an `Engine` without a model that checks that each row reads exactly its own prefix.

For each KV location it stores the hash of the token prefix that was written there. The expected tokens come from the
requests alone (`minisgl.testing.truth`). The engine reads a step's arrays only when the step's result is requested,
which is the latest time that the stream rule allows. It uses no state of the scheduler, the cache or the page
allocator, and needs no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from minisgl.core import I32, I64, PENDING, Admission, EngineDeadError, EngineSpec, Step, StepResult
from minisgl.testing.form import check_form, digest
from minisgl.testing.truth import ExpectedTokens, SimRequest, stop_ids
from minisgl.testing.violation import SimViolation

__all__ = ["SimCounts", "SimEngine"]

_NONE, _SEVERAL = -1, -2  # used in place of an admission number: no admission, more than one admission


@dataclass
class SimCounts:
    """Counts of the work that the engine has done. All counts of tokens are computed positions."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    prompt_tokens: int = 0  # part of ``tokens``: positions of a prompt
    recomputed: int = 0  # part of ``tokens``: positions that the same request computed before it was retracted
    max_rows: int = 0  # rows in one step
    max_tokens: int = 0  # positions in one step
    admissions: dict[int, int] = field(default_factory=dict)  # uid -> number of admissions
    computed_by: dict[int, int] = field(default_factory=dict)  # uid -> computed positions


@dataclass
class _Admitted:
    """The request of a request-pool row. ``number`` counts admissions; each admission of a request has another."""

    number: int
    uid: int
    end: int = -1  # position after its last row; -1: the request had no row since its admission
    last_token: int = -1  # sampled last
    last_position: int = -1  # position of last_token
    ended_by: int = -1  # the step whose result ended the request; -1: the request has not ended


@dataclass
class _Launched:
    step: Step
    digest: bytes
    read: int  # number of results that were read before the launch


@dataclass
class _Footprint:
    """The request-pool rows and pages that an executed step accessed.

    Kept as long as a step that was launched before this step's result was read has not been executed.
    """

    pool_rows: I64  # [max_running_requests] number of the admission that had a row of the step, or _NONE
    pages: I64  # [num_pages] number of the admission that accessed the page, _NONE or _SEVERAL


@dataclass
class _Row:
    index: int
    req_pool_idx: int
    admitted: _Admitted
    stream: ExpectedTokens
    start: int
    end: int
    tokens: I32
    sample: bool
    pages: I32  # of positions 0 … end - 1

    def at(self, step: int, **more: int) -> dict[str, Any]:
        return {
            "step": step,
            "row": self.index,
            "uid": self.admitted.uid,
            "req_pool_idx": self.req_pool_idx,
            **more,
        }


class SimEngine:
    """An engine whose tokens are hashes of their prefixes.

    - ``requests``: uid → request. Read when a step admits the uid, so requests may be added later.
    - ``eos_ids``: token ids that end a request, unless it ignores them.
    - ``depth``: how many launched steps may be unread: 2 with overlap, 1 without.
    - ``dies_at``: the launch of the step with this number raises `EngineDeadError`. With ``dies_late``, the read of its
      result raises it instead.

    `launch` and `result` raise `SimViolation` if a step breaks a rule.
    """

    def __init__(
        self,
        spec: EngineSpec,
        requests: Mapping[int, SimRequest],
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
        self._writer = np.full(spec.num_pages, _NONE, np.int64)  # number of the admission that wrote a page last
        self._written = np.full(spec.num_pages, -1, np.int64)  # the step that wrote a page last
        self._page_table = np.full((spec.max_running_requests, columns), -1, np.int32)
        # The step that wrote each entry of the page table.
        self._entry_written = np.full((spec.max_running_requests, columns), -1, np.int64)
        self._admitted: list[_Admitted | None] = [None] * spec.max_running_requests  # by req_pool_idx
        self._streams: dict[int, ExpectedTokens] = {}
        self._seeds: dict[int, int] = {}
        self._newest: dict[int, int] = {}  # uid -> position of its newest sampled token
        self._reached: dict[int, int] = {}  # uid -> highest end of a row so far
        self._unread: deque[_Launched] = deque()
        self._footprints: dict[int, _Footprint] = {}
        self._next_id = self._read = self._num_admissions = 0

    # ---- the protocol ------------------------------------------------------------------------------

    def launch(self, step: Step) -> None:
        """Queue a step. Check only its number and the number of unread steps now; `result` checks the rest."""
        self._alive()
        if step.id == self.dies_at and not self.dies_late:
            raise EngineDeadError(f"the simulated device failed at the launch of step {step.id}")
        if step.id != self._next_id:
            raise SimViolation("step-id", f"expected step {self._next_id}", step=step.id)
        if len(self._unread) >= self.depth:
            text = f"the step was launched while {len(self._unread)} steps were in flight; at most {self.depth} may be"
            raise SimViolation("unread-steps", text, step=step.id)
        self._next_id += 1
        self._unread.append(_Launched(step, digest(step), self._read))

    def result(self) -> StepResult:
        """Execute the oldest unread step, check it, and return what it sampled: tokens [rows, 1]."""
        self._alive()
        if not self._unread:
            raise SimViolation("unread-steps", "result() was called, but no step is in flight")
        launched = self._unread.popleft()
        step = launched.step
        if step.id == self.dies_at:
            raise EngineDeadError(f"the simulated device failed in step {step.id}")
        if digest(step) != launched.digest:
            text = "an array of the step was changed after the launch; it may be a view of the scheduler's state"
            raise SimViolation("step-changed", text, step=step.id)
        check_form(step, self.spec)
        self._apply_admissions(step, launched.read)
        self._apply_page_table_updates(step)
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
        """Close the engine. Later calls of `launch` and `result` raise `EngineDeadError`."""
        self.closed = True

    @property
    def unread(self) -> int:
        """Number of steps in flight: launched, and their results not read yet."""
        return len(self._unread)

    def pages_of(self, uid: int) -> I32:
        """Return the pages of an admitted request in its page table, in order, as of the last result that was read.

        Raise KeyError if the request has no request-pool row.
        """
        for req_pool_idx, admitted in enumerate(self._admitted):
            if admitted is not None and admitted.uid == uid:
                pages: I32 = self._page_table[req_pool_idx]
                return pages[pages >= 0]
        raise KeyError(f"request {uid} has no request-pool row")

    def _alive(self) -> None:
        if self.closed:
            raise EngineDeadError("the simulated engine was closed")

    # ---- executing a step ----------------------------------------------------------------------------

    def _apply_admissions(self, step: Step, read: int) -> None:
        used: set[int] = set()
        for admission in step.admissions:
            uid, req_pool_idx = admission.uid, admission.req_pool_idx

            def fail(rule: str, text: str, admission: Admission = admission) -> NoReturn:
                raise SimViolation(rule, text, step=step.id, uid=admission.uid, req_pool_idx=admission.req_pool_idx)

            if not 0 <= req_pool_idx < self.spec.max_running_requests:
                fail("admission", f"expected a req_pool_idx from 0 to {self.spec.max_running_requests - 1}")
            if req_pool_idx in used:
                fail("admission", "the step admits two requests to this request-pool row")
            if uid not in self.requests:
                fail("admission", f"no request has the uid {uid}")
            request = self.requests[uid]
            if admission.params != request.params:
                fail(
                    "admission", f"the request's parameters are {request.params}, the admission has {admission.params}"
                )
            if self._seeds.setdefault(uid, admission.seed) != admission.seed:
                fail("admission", f"the seed was {self._seeds[uid]} at the first admission and is {admission.seed} now")
            for unread in range(read, step.id):
                if self._footprints[unread].pool_rows[req_pool_idx] != _NONE:
                    text = f"step {unread}, unread at the launch, has a row of an earlier admission with this index"
                    fail("row-in-flight", text)
            used.add(req_pool_idx)
            stream = self._streams.setdefault(uid, ExpectedTokens(request, self.spec.vocab_size))
            self._check_history(step, admission, stream)
            self._admitted = [None if o is not None and o.uid == uid else o for o in self._admitted]
            self._admitted[req_pool_idx] = _Admitted(self._num_admissions, uid)
            self._num_admissions += 1
            self._page_table[req_pool_idx] = -1
            self._entry_written[req_pool_idx] = -1
            self.counts.admissions[uid] = self.counts.admissions.get(uid, 0) + 1

    def _check_history(self, step: Step, admission: Admission, stream: ExpectedTokens) -> None:
        """Check the prompt and output ids of an admission whose request has penalties.

        Penalties count the tokens before the step: the prompt, and the output so far. A token that was in flight when
        the request was retracted may be missing, because the scheduler discards it.
        """
        if not admission.params.needs_history:
            return
        sampled = self._newest.get(admission.uid, stream.num_prompt_tokens - 1) + 1
        prompt, output = admission.prompt_ids, admission.output_ids
        location = {"step": step.id, "uid": admission.uid, "req_pool_idx": admission.req_pool_idx}
        if prompt is None or not np.array_equal(prompt, stream.tokens[: stream.num_prompt_tokens]):
            text = "the request has a penalty, and prompt_ids of the admission are not the request's prompt"
            raise SimViolation("admission", text, **location)
        length = stream.num_prompt_tokens + (0 if output is None else len(output))
        if not sampled - (self.depth - 1) <= length <= sampled or not np.array_equal(
            output if output is not None else [], stream.tokens[stream.num_prompt_tokens : length]
        ):
            count = sampled - stream.num_prompt_tokens
            text = f"the request has a penalty, and output_ids of the admission are not its {count} tokens so far"
            raise SimViolation("admission", text, **location)

    def _apply_page_table_updates(self, step: Step) -> None:
        indices, columns, pages = step.page_table_updates
        self._page_table[indices, columns] = pages
        self._entry_written[indices, columns] = step.id

    def _rows(self, step: Step) -> list[_Row]:
        rows = []
        offset = 0
        for index in range(step.rows):
            req_pool_idx, start, count = (
                int(step.req_pool_indices[index]),
                int(step.num_computed_tokens[index]),
                int(step.num_scheduled_tokens[index]),
            )
            admitted = self._admitted[req_pool_idx]
            if admitted is None:
                text = "no request was admitted to this request-pool row"
                raise SimViolation("admission", text, step=step.id, row=index, req_pool_idx=req_pool_idx)
            stream, end = self._streams[admitted.uid], start + count
            limit = min(stream.max_len - 1, self.spec.max_seq_len)  # the last token's KV is never read
            location = {"step": step.id, "row": index, "uid": admitted.uid, "req_pool_idx": req_pool_idx}
            if start < 0 or end > limit:
                text = f"the row computes positions {start} to {end - 1}; the last allowed position is {limit - 1}"
                raise SimViolation("position", text, **location)
            pages = self._page_table[req_pool_idx, : -(-end // self.spec.page_size)]
            for column in np.flatnonzero(pages < 0)[:1]:
                position = int(column) * self.spec.page_size
                text = f"column {column} of the page table row was not written since the request was admitted"
                raise SimViolation("table-missing", text, **location, position=position)
            tokens = step.input_ids[offset : offset + count]
            sample = bool(step.sample[index])
            rows.append(_Row(index, req_pool_idx, admitted, stream, start, end, tokens, sample, pages))
            offset += count
        return rows

    def _check_owners(self, step: Step, rows: list[_Row], read: int) -> None:
        """Check that no two requests use a page in a way that conflicts.

        A page that a row writes must not be accessed by another row of this step, or by another request in a step that
        was in flight when this step was launched. A page of a row must not have been written by another request since
        the row's page table entry was written.
        """
        size = self.spec.page_size
        uses = np.bincount(np.concatenate([row.pages for row in rows]), minlength=self.spec.num_pages)
        footprint = _Footprint(
            np.full(self.spec.max_running_requests, _NONE, np.int64), np.full(self.spec.num_pages, _NONE, np.int64)
        )
        for row in rows:
            number, first = row.admitted.number, row.start // size
            written = row.pages[first:]
            for i in np.flatnonzero(uses[written] > 1)[:1]:
                self._fail_shared(step.id, row, first + int(i), rows)
            for unread in range(read, step.id):
                user = self._footprints[unread].pages[written]
                for i in np.flatnonzero((user != _NONE) & (user != number))[:1]:
                    text = (
                        f"the row writes a page that step {unread}, unread at the launch, accesses for another request"
                    )
                    location = row.at(step.id, page=int(written[i]), position=(first + int(i)) * size)
                    raise SimViolation("page-in-flight", text, **location)
            since = self._entry_written[row.req_pool_idx, : len(row.pages)]
            stale = (self._writer[row.pages] != number) & (self._written[row.pages] >= since)
            for i in np.flatnonzero(stale & (self._writer[row.pages] != _NONE))[:1]:
                page = int(row.pages[i])
                text = (
                    f"the request's page table contains the page since step {since[i]}, but step {self._written[page]} "
                    "wrote the page for another request: the page was freed while the page table still pointed to it"
                )
                raise SimViolation("page-retired", text, **row.at(step.id, page=page, position=int(i) * size))
            before = footprint.pages[row.pages]
            footprint.pages[row.pages] = np.where(before == _NONE, number, _SEVERAL)
            footprint.pool_rows[row.req_pool_idx] = number
        self._footprints[step.id] = footprint

    def _fail_shared(self, step: int, row: _Row, column: int, rows: list[_Row]) -> NoReturn:
        """Raise the violation for a page that ``row`` writes and that is also elsewhere in the page tables of the step.

        If another row's page table has had the page for longer, the page was freed too early: "page-retired" at that
        row. Otherwise "page-shared".
        """
        size, page = self.spec.page_size, int(row.pages[column])
        other = next((r for r in rows if r is not row and page in r.pages), None)
        if other is None:
            text = "the row writes a page that is twice in its page table"
            raise SimViolation("page-shared", text, **row.at(step, page=page, position=column * size))
        theirs = int(np.flatnonzero(other.pages == page)[0])
        since = int(self._entry_written[other.req_pool_idx, theirs])
        if since < self._entry_written[row.req_pool_idx, column]:
            writer = f"row {row.index} (request {row.admitted.uid})"
            text = (
                f"the request's page table contains the page since step {since}, but {writer} got it and writes to it"
            )
            raise SimViolation("page-retired", text, **other.at(step, page=page, position=theirs * size))
        text = f"the row writes a page that row {other.index} (request {other.admitted.uid}) uses too"
        raise SimViolation("page-shared", text, **row.at(step, page=page, position=column * size))

    def _check_row(self, step: int, row: _Row, read: int) -> None:
        admitted, stream, start, end = row.admitted, row.stream, row.start, row.end
        if 0 <= admitted.ended_by < read:
            text = f"the result of step {admitted.ended_by}, read before the launch, ended the request"
            raise SimViolation("row-after-end", text, **row.at(step))
        if admitted.end >= 0 and start != admitted.end:
            text = f"the row starts at position {start}; expected {admitted.end}, where the request's last row ended"
            raise SimViolation("start", text, **row.at(step, position=start))
        newest = self._newest.get(admitted.uid, stream.num_prompt_tokens - 1)
        stream.extend(end)
        self._check_tokens(step, row, newest)
        if start:
            kv = self._kv[row.pages[: -(-start // self.spec.page_size)]].reshape(-1)[:start]
            for position in np.flatnonzero(kv != stream.hashes[1 : start + 1])[:1]:
                page = int(row.pages[position // self.spec.page_size])
                text = f"the row reads {self._describe(int(kv[position]))}; expected the KV of its own prefix"
                raise SimViolation("kv-content", text, **row.at(step, page=page, position=int(position)))
        # The scheduler discards a token that was in flight when its request was retracted. It is sampled again later.
        if row.sample and not newest - (self.depth - 1) < end <= newest + 1:
            text = f"the row samples after position {end - 1}, but the newest token of the request is at {newest}"
            raise SimViolation("sample", text, **row.at(step, position=end - 1))
        if not row.sample and end > newest:
            text = "the row computes the newest token of the request, but does not sample"
            raise SimViolation("sample", text, **row.at(step, position=end - 1))

    def _check_tokens(self, step: int, row: _Row, newest: int) -> None:
        admitted, start = row.admitted, row.start
        tokens = row.tokens
        if len(tokens) == 1 and tokens[0] == PENDING:
            if admitted.last_position != start:
                last = admitted.last_position
                seen = f"the token of position {last}" if last >= 0 else "no token"
                text = (
                    f"the input of position {start} is the token sampled last, but {seen} was sampled since admission"
                )
                raise SimViolation("input-token", text, **row.at(step, position=start))
            tokens = np.asarray([admitted.last_token], np.int32)
        expected = row.stream.tokens[start : row.end]
        for i in np.flatnonzero(tokens != expected)[:1]:
            text = f"the input token is {tokens[i]}, expected {expected[i]}"
            raise SimViolation("input-token", text, **row.at(step, position=start + int(i)))
        if row.end > newest + 1:
            text = f"the row computes position {row.end - 1}, but the newest token of the request is at {newest}"
            raise SimViolation("input-token", text, **row.at(step, position=row.end - 1))

    def _compute(self, step: int, row: _Row) -> int:
        """Write the row's KV and return its sampled token, or 0 if the row does not sample."""
        admitted, stream, start, end = row.admitted, row.stream, row.start, row.end
        size = self.spec.page_size
        positions = np.arange(start, end)
        pages = row.pages[positions // size]
        self._kv[pages, positions % size] = stream.hashes[start + 1 : end + 1]
        self._writer[pages] = admitted.number
        self._written[pages] = step
        admitted.end = end
        if not row.sample:
            return 0
        token = stream[end]
        admitted.last_token, admitted.last_position = token, end
        self._newest[admitted.uid] = max(end, self._newest.get(admitted.uid, -1))
        if end + 1 >= stream.max_len or token in stop_ids(stream.params, self.eos_ids):
            admitted.ended_by = step if admitted.ended_by < 0 else admitted.ended_by
        return token

    # ---- messages and counts -------------------------------------------------------------------------

    def _describe(self, content: int) -> str:
        """Describe the KV of a location in words, given its prefix hash."""
        if content == 0:
            return "a KV location that was never written"
        for uid, stream in self._streams.items():
            for length in np.flatnonzero(stream.hashes[1 : stream.num_known + 1] == np.uint64(content))[:1]:
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
            uid, computed = row.admitted.uid, counts.computed_by
            computed[uid] = computed.get(uid, 0) + row.end - row.start
            reached = self._reached.get(uid, 0)
            counts.prompt_tokens += max(0, min(row.end, row.stream.num_prompt_tokens) - row.start)
            counts.recomputed += max(0, min(row.end, reached) - row.start)
            self._reached[uid] = max(row.end, reached)
