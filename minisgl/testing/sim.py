"""The simulated engine: an `Engine` without a model that checks that each row reads exactly its own prefix.

For each KV location it stores the hash of the token prefix that was written there, and by which KV group. A row of a
group with a window reads the positions of its window only. `minisgl.testing.sim_states` has the recurrent states. The
expected tokens come from the requests alone (`minisgl.testing.truth`). The engine reads a step's arrays only when the
step's result is requested, which is the latest time that the stream rule allows. It uses no state of the scheduler, the
cache or the page allocator, and needs no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn

import numpy as np

from minisgl.core import (
    I32,
    I64,
    PENDING,
    Admission,
    Bools,
    EngineDeadError,
    EngineSpec,
    Logprobs,
    Step,
    StepResult,
    TokenMasks,
)
from minisgl.testing.form import check_form, digest
from minisgl.testing.sim_records import NONE, SEVERAL, Admitted, Footprint, Launched, Row, RowPages, digest_of
from minisgl.testing.sim_sampling import check_masks, score_prompts
from minisgl.testing.sim_states import SimStates
from minisgl.testing.truth import (
    ExpectedTokens,
    SimRequest,
    choose,
    extend_hash,
    mix,
    score,
    stop_ids,
)
from minisgl.testing.violation import SimViolation

__all__ = ["SimCounts", "SimEngine"]


@dataclass
class SimCounts:
    """Counts of the work that the engine has done. All counts of tokens are computed positions."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    prompt_tokens: int = 0  # part of ``tokens``: positions of a prompt
    recomputed: int = 0  # part of ``tokens``: positions that the same request computed before it was retracted
    drafts: int = 0  # part of ``tokens``: draft tokens
    accepted_drafts: int = 0  # part of ``drafts``
    later_rounds: int = 0  # rounds of steps, without the first of each step
    masks: int = 0  # masks of sampled positions
    max_rows: int = 0  # rows in one step
    max_tokens: int = 0  # positions in one step
    admissions: dict[int, int] = field(default_factory=dict)  # uid -> number of admissions
    computed_by: dict[int, int] = field(default_factory=dict)  # uid -> computed positions without rejected drafts


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
        columns = len(spec.groups) * spec.num_columns
        # Part of the KV's content: no group reads the KV of another.
        self._marks = [np.uint64(number and mix(number)) for number in range(len(spec.groups))]
        self._states = SimStates(spec, self._describe) if spec.has_states else None
        self._kv = np.zeros((spec.num_pages, spec.page_size), np.uint64)
        self._writer = np.full(spec.num_pages, NONE, np.int64)  # number of the admission that wrote a page last
        self._written = np.full(spec.num_pages, -1, np.int64)  # the step that wrote a page last
        self._page_table = np.full((spec.max_running_requests, columns), -1, np.int32)
        # The step that wrote each entry of the page table.
        self._entry_written = np.full((spec.max_running_requests, columns), -1, np.int64)
        self._admitted: list[Admitted | None] = [None] * spec.max_running_requests  # by req_pool_idx
        self._streams: dict[int, ExpectedTokens] = {}
        self._seeds: dict[int, int] = {}
        self._newest: dict[int, int] = {}  # uid -> position of its newest sampled token
        # uid -> number of tokens of the request before and after its last row that sampled.
        self._last_run: dict[int, tuple[int, int]] = {}
        self._reached: dict[int, int] = {}  # uid -> highest end of a row so far
        self._unread: deque[Launched] = deque()
        self._footprints: dict[int, Footprint] = {}
        self._next_id = self._read = self._num_admissions = 0

    # ---- the protocol ------------------------------------------------------------------------------

    def launch(self, step: Step) -> None:
        """Queue a step. Check only its number and the number of unread steps now; `result` checks the rest."""
        self._alive()
        if step.id == self.dies_at and not self.dies_late:
            raise EngineDeadError(f"the simulated device failed at the launch of step {step.id}")
        if step.id != self._next_id:
            raise SimViolation("step-id", f"expected step {self._next_id}", step=step.id)
        if self._unread and self._unread[-1].step.late_sampling and self._unread[-1].sampled < 0:
            text = f"the step was launched before the sampling of step {step.id - 1}, which has late_sampling"
            raise SimViolation("late-sampling", text, step=step.id)
        if len(self._unread) >= self.depth:
            text = f"the step was launched while {len(self._unread)} steps were in flight; at most {self.depth} may be"
            raise SimViolation("unread-steps", text, step=step.id)
        self._next_id += 1
        self._unread.append(Launched(step, digest(step), self._read))

    def sample(self, masks: TokenMasks) -> None:
        """Store the masks of the step launched last; `result` checks them."""
        self._alive()
        launched = self._unread[-1] if self._unread else None
        if launched is None or not launched.step.late_sampling or launched.sampled >= 0:
            raise SimViolation("late-sampling", "sample() was called, but no launched step waits for its masks")
        shape = (len(masks.positions), -(-self.spec.vocab_size // 32))
        if masks.bits.shape != shape or not masks.bits.dtype == masks.positions.dtype == np.int32:
            text = f"the bits of the masks are {masks.bits.dtype} {masks.bits.shape}, expected int32 {shape}"
            raise SimViolation("mask", text, step=launched.step.id)
        launched.masks, launched.masks_digest, launched.sampled = masks, digest_of(masks), self._read

    def result(self) -> StepResult:
        """Execute the oldest unread step, check it, and return what it sampled."""
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
        if step.late_sampling and launched.sampled < 0:
            text = "the result was read before the sampling of the step, which has late_sampling"
            raise SimViolation("late-sampling", text, step=step.id)
        if launched.masks is not None and digest_of(launched.masks) != launched.masks_digest:
            raise SimViolation("step-changed", "the masks were changed after the call of sample()", step=step.id)
        check_form(step, self.spec)
        self._apply_admissions(step, launched.read)
        self._apply_page_table_updates(step)
        if self._states is not None:
            self._states.load(step)
        rows = self._rows(step)
        self._check_owners(step, rows, launched.read)
        for row in rows:
            self._check_row(step.id, row, launched.read)
        allowed = check_masks(launched, rows, self.spec.vocab_size)
        self.counts.masks += len(allowed)
        prompt_logprobs = score_prompts(step, rows)
        tokens = np.zeros((step.rows, max(int(step.num_sampled_tokens.max()), 1) * step.rounds), np.int32)
        accepted = np.zeros((step.rounds, step.rows), np.int32)
        logprobs: list[tuple[Logprobs, ...] | None] = [None] * step.rows
        later_rows: list[Row] = []  # of the rounds after the first
        for row in rows:
            prefixes, sampled = self._compute(step.id, row, allowed)
            tokens[row.index, : len(sampled)] = sampled
            accepted[0, row.index] = row.accepted
            for number in range(1, step.rounds):
                end = int(accepted[:, row.index].sum())
                later = self._next_round(row)
                _, sampled = self._compute(step.id, later, {}, first_round=False)
                tokens[row.index, end : end + len(sampled)] = sampled
                accepted[number, row.index] = later.accepted
                later_rows.append(later)
            if row.stream.params.logprobs is not None and row.num_sampled:
                chosen = zip(prefixes[: row.accepted], sampled, strict=False)
                logprobs[row.index] = tuple(Logprobs(score(prefix, token)) for prefix, token in chosen)
        if self._states is not None:
            self._states.save(step, rows)
        self._count(rows)
        self._count_rounds(later_rows)
        self.counts.later_rounds += step.rounds - 1
        self._read += 1
        self._footprints.pop(step.id - self.depth, None)
        reported = tuple(logprobs) if any(entry is not None for entry in logprobs) else None
        rounds = accepted if step.rounds > 1 else None
        return StepResult(step.id, tokens, accepted.sum(0, dtype=np.int32), reported, prompt_logprobs, rounds)

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
                if self._footprints[unread].pool_rows[req_pool_idx] != NONE:
                    text = f"step {unread}, unread at the launch, has a row of an earlier admission with this index"
                    fail("row-in-flight", text)
            used.add(req_pool_idx)
            stream = self._streams.setdefault(uid, ExpectedTokens(request, self.spec.vocab_size))
            self._check_history(step, admission, stream)
            self._admitted = [None if o is not None and o.uid == uid else o for o in self._admitted]
            self._admitted[req_pool_idx] = Admitted(self._num_admissions, uid)
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
        prompt, output = admission.prompt_ids, admission.output_ids
        location = {"step": step.id, "uid": admission.uid, "req_pool_idx": admission.req_pool_idx}
        if prompt is None or not np.array_equal(prompt, stream.tokens[: stream.num_prompt_tokens]):
            text = "the request has a penalty, and prompt_ids of the admission are not the request's prompt"
            raise SimViolation("admission", text, **location)
        length = stream.num_prompt_tokens + (0 if output is None else len(output))
        possible = self._possible_lengths(admission.uid, stream)
        stream.extend(max(possible))
        if length not in possible or not np.array_equal(
            output if output is not None else [], stream.tokens[stream.num_prompt_tokens : length]
        ):
            count = max(possible) - stream.num_prompt_tokens
            text = f"the request has a penalty, and output_ids of the admission are not its {count} tokens so far"
            raise SimViolation("admission", text, **location)

    def _apply_page_table_updates(self, step: Step) -> None:
        indices, columns, pages = step.page_table_updates
        self._page_table[indices, columns] = pages
        self._entry_written[indices, columns] = step.id

    def _rows(self, step: Step) -> list[Row]:
        rows = []
        offset = first_sampled = 0
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
            last_end = start + step.rounds * count  # after the positions of all rounds
            limit = min(stream.max_len - 1, self.spec.max_seq_len)  # the last token's KV is never read
            location = {"step": step.id, "row": index, "uid": admitted.uid, "req_pool_idx": req_pool_idx}
            if start < 0 or last_end > limit:
                text = f"the row computes positions {start} to {last_end - 1}; the last allowed position is {limit - 1}"
                raise SimViolation("position", text, **location)
            pages = self._pages(req_pool_idx, start, last_end)
            for of in pages:
                for column in np.flatnonzero(of.pages < 0)[:1] + of.first:
                    position = int(column) * self.spec.page_size
                    text = f"column {column} of the page table row was not written since the request was admitted"
                    raise SimViolation("table-missing", text + _of(of), **location, position=position)
            tokens = step.input_ids[offset : offset + count]
            num_sampled = int(step.num_sampled_tokens[index])
            verifies = index in step.verification_rows
            rows.append(
                Row(
                    index,
                    req_pool_idx,
                    admitted,
                    stream,
                    start,
                    end,
                    tokens,
                    num_sampled,
                    verifies,
                    first_sampled,
                    pages,
                )
            )
            offset += count
            first_sampled += num_sampled
        return rows

    def _pages(self, req_pool_idx: int, start: int, end: int) -> list[RowPages]:
        """Return the pages of each group that hold what the positions from ``start`` to ``end`` read and write."""
        found = []
        for number, group in enumerate(self.spec.groups):
            first = 0 if group.window < 0 else max(start - group.window + 1, 0) // self.spec.page_size
            columns = slice(*(number * self.spec.num_columns + n for n in (first, -(-end // self.spec.page_size))))
            found.append(RowPages(number, first, self._page_table[req_pool_idx, columns]))
        return found

    def _since(self, row: Row, of: RowPages) -> I64:
        """Return the step that wrote the page-table entry of each of the pages."""
        first = of.group * self.spec.num_columns + of.first
        since: I64 = self._entry_written[row.req_pool_idx, first : first + len(of.pages)]
        return since

    def _check_owners(self, step: Step, rows: list[Row], read: int) -> None:
        """Check that no two requests use a page in a way that conflicts.

        A page that a row writes must not be accessed by another row of this step, or by another request in a step that
        was in flight when this step was launched. A page of a row must not have been written by another request since
        the row's page table entry was written.
        """
        size = self.spec.page_size
        uses = np.bincount(
            np.concatenate([of.pages for row in rows for of in row.pages]), minlength=self.spec.num_pages
        )
        footprint = Footprint(
            np.full(self.spec.max_running_requests, NONE, np.int64), np.full(self.spec.num_pages, NONE, np.int64)
        )
        for row, of in [(each, of) for each in rows for of in each.pages]:
            number, first = row.admitted.number, row.start // size
            written = of.pages[first - of.first :]
            for i in np.flatnonzero(uses[written] > 1)[:1]:
                self._fail_shared(step.id, row, of, first + int(i), rows)
            for unread in range(read, step.id):
                user = self._footprints[unread].pages[written]
                for i in np.flatnonzero((user != NONE) & (user != number))[:1]:
                    text = (
                        f"the row writes a page that step {unread}, unread at the launch, accesses for another request"
                    )
                    location = row.at(step.id, page=int(written[i]), position=(first + int(i)) * size)
                    raise SimViolation("page-in-flight", text, **location)
            since = self._since(row, of)
            stale = (self._writer[of.pages] != number) & (self._written[of.pages] >= since)
            for i in np.flatnonzero(stale & (self._writer[of.pages] != NONE))[:1]:
                page = int(of.pages[i])
                text = (
                    f"the request's page table contains the page since step {since[i]}, but step {self._written[page]} "
                    "wrote the page for another request: the page was freed while the page table still pointed to it"
                )
                position = (of.first + int(i)) * size
                raise SimViolation("page-retired", text, **row.at(step.id, page=page, position=position))
            before = footprint.pages[of.pages]
            footprint.pages[of.pages] = np.where(before == NONE, number, SEVERAL)
            footprint.pool_rows[row.req_pool_idx] = number
        self._footprints[step.id] = footprint

    def _fail_shared(self, step: int, row: Row, of: RowPages, column: int, rows: list[Row]) -> NoReturn:
        """Raise the violation for a page that ``row`` writes and that is also elsewhere in the page tables of the step.

        If another row's page table has had the page for longer, the page was freed too early: "page-retired" at that
        row. Otherwise "page-shared".
        """
        size, page = self.spec.page_size, int(of.pages[column - of.first])
        users = ((r, their) for r in rows for their in r.pages if r is not row and page in their.pages)
        other, their = next(users, (None, of))
        if other is None:
            text = "the row writes a page that is twice in its page table"
            raise SimViolation("page-shared", text, **row.at(step, page=page, position=column * size))
        theirs = int(np.flatnonzero(their.pages == page)[0])
        since = int(self._since(other, their)[theirs])
        if since < self._since(row, of)[column - of.first]:
            writer = f"row {row.index} (request {row.admitted.uid})"
            text = (
                f"the request's page table contains the page since step {since}, but {writer} got it and writes to it"
            )
            raise SimViolation(
                "page-retired", text, **other.at(step, page=page, position=(their.first + theirs) * size)
            )
        text = f"the row writes a page that row {other.index} (request {other.admitted.uid}) uses too"
        raise SimViolation("page-shared", text, **row.at(step, page=page, position=column * size))

    def _check_row(self, step: int, row: Row, read: int) -> None:
        admitted, stream, start, end = row.admitted, row.stream, row.start, row.end
        if 0 <= admitted.ended_by < read:
            text = f"the result of step {admitted.ended_by}, read before the launch, ended the request"
            raise SimViolation("row-after-end", text, **row.at(step))
        if admitted.verified_by >= read:
            text = f"step {admitted.verified_by}, unread at the launch, has a verification row of the request"
            raise SimViolation("verify-unread", text, **row.at(step))
        if admitted.end >= 0 and start != admitted.end:
            text = f"the row starts at position {start}; expected {admitted.end}, where the request's last row ended"
            raise SimViolation("start", text, **row.at(step, position=start))
        newest = self._newest.get(admitted.uid, stream.num_prompt_tokens - 1)
        stream.extend(end)
        self._check_tokens(step, row, newest)
        for of in row.pages:
            size, window = self.spec.page_size, self.spec.groups[of.group].window
            first = of.first * size if window < 0 else max(start - window + 1, 0)  # position that the row reads first
            mark = np.uint64(stream.namespace) ^ self._marks[of.group]
            kv = self._kv[of.pages[: -(-start // size) - of.first]].reshape(-1)[first - of.first * size :]
            for i in np.flatnonzero(kv[: start - first] != stream.hashes[first + 1 : start + 1] ^ mark)[:1]:
                position = first + int(i)
                page = int(of.pages[position // size - of.first])
                found = self._describe(int(kv[i] ^ self._marks[of.group]))
                text = f"the row reads {found}{_of(of)}; expected the KV of its own prefix"
                raise SimViolation("kv-content", text, **row.at(step, page=page, position=position))
        if self._states is not None:
            self._states.check(step, row)
        # The scheduler discards tokens that were in flight when their request was retracted, and samples them again.
        first = end - max(row.num_sampled - 1, 0)  # position after the last token that is no draft
        if row.num_sampled and first not in self._possible_lengths(admitted.uid, stream):
            text = f"the row samples after position {first - 1}, but the newest token of the request is at {newest}"
            raise SimViolation("sample", text, **row.at(step, position=first - 1))
        if not row.num_sampled and end > newest:
            text = "the row computes the newest token of the request, but does not sample"
            raise SimViolation("sample", text, **row.at(step, position=end - 1))

    def _check_tokens(self, step: int, row: Row, newest: int) -> None:
        admitted, start = row.admitted, row.start
        tokens = row.tokens[:1] if row.verifies else row.tokens
        end = start + len(tokens)
        if len(tokens) == 1 and tokens[0] == PENDING:
            if admitted.last_position != start:
                last = admitted.last_position
                seen = f"the token of position {last}" if last >= 0 else "no token"
                text = (
                    f"the input of position {start} is the token sampled last, but {seen} was sampled since admission"
                )
                raise SimViolation("input-token", text, **row.at(step, position=start))
            tokens = np.asarray([admitted.last_token], np.int32)
        expected = row.stream.tokens[start:end]
        for i in np.flatnonzero(tokens != expected)[:1]:
            text = f"the input token is {tokens[i]}, expected {expected[i]}"
            raise SimViolation("input-token", text, **row.at(step, position=start + int(i)))
        if end > newest + 1:
            text = f"the row computes position {end - 1}, but the newest token of the request is at {newest}"
            raise SimViolation("input-token", text, **row.at(step, position=end - 1))
        for i in np.flatnonzero(row.tokens >= self.spec.vocab_size)[:1]:
            text = f"draft token {row.tokens[i]} is not in the vocabulary"
            raise SimViolation("input-token", text, **row.at(step, position=start + int(i)))

    def _compute(
        self, step: int, row: Row, allowed: dict[int, Bools], *, first_round: bool = True
    ) -> tuple[list[int], list[int]]:
        """Write the row's KV, set ``row.accepted``, and return the prefix and the token of each sampled position.

        A prefix is given by its hash. ``allowed`` has the tokens that each masked position may sample.
        """
        admitted, stream, start, end = row.admitted, row.stream, row.start, row.end
        drafts = row.tokens[1:].tolist() if row.verifies else []
        size = self.spec.page_size
        positions = np.arange(start, end)
        prefixes = [int(stream.hashes[end - len(drafts)])]
        for draft in drafts:
            prefixes.append(extend_hash(prefixes[-1], draft))
        written = np.concatenate((stream.hashes[start + 1 : end - len(drafts)], np.array(prefixes, np.uint64)))
        for of in row.pages:
            pages = of.pages[positions // size - of.first]
            self._kv[pages, positions % size] = written ^ np.uint64(stream.namespace) ^ self._marks[of.group]
            self._writer[pages] = admitted.number
            self._written[pages] = step
        if self._states is not None:
            self._states.absorb(row, written.tolist())
        admitted.end = end
        if not row.num_sampled:
            return [], []
        sampled = [
            choose(prefix, stream.salt, allowed.get(row.first_sampled + k), self.spec.vocab_size)
            for k, prefix in enumerate(prefixes)
        ]
        row.accepted = 1 + next((k for k, draft in enumerate(drafts) if draft != sampled[k]), len(drafts))
        admitted.end = end - len(drafts) + row.accepted - 1
        if row.verifies:
            admitted.verified_by = step
        admitted.last_token, admitted.last_position = sampled[row.accepted - 1], admitted.end
        before = admitted.end - row.accepted + 1
        if first_round:  # the scheduler discards the tokens of all rounds together
            self._last_run[admitted.uid] = (before, before)
        self._last_run[admitted.uid] = (self._last_run[admitted.uid][0], admitted.end + 1)
        self._newest[admitted.uid] = max(admitted.end, self._newest.get(admitted.uid, -1))
        stops = stop_ids(stream.params, self.eos_ids)
        dead_end = any(map(stream.is_dead_end, prefixes[: row.accepted]))
        if dead_end or admitted.end + 1 >= stream.max_len or not stops.isdisjoint(sampled[: row.accepted]):
            admitted.ended_by = step if admitted.ended_by < 0 else admitted.ended_by
        return prefixes, sampled

    def _next_round(self, row: Row) -> Row:
        """Return the row of the next round: after the last token that counts, with drafts of which some are right."""
        start, count = row.admitted.end, row.num_sampled
        row.stream.extend(start + count)
        tokens = row.stream.tokens[start : start + count].copy()
        right = int(row.stream.hashes[start]) % (2 * count)  # number of right drafts, if it is not larger than all
        if right + 1 < count:
            tokens[right + 1] = (tokens[right + 1] + 1) % self.spec.vocab_size
        return replace(row, start=start, end=start + count, tokens=tokens, accepted=0)

    def _count_rounds(self, rows: Collection[Row]) -> None:
        """Count the work of the ``rows`` of the rounds after the first."""
        for row in rows:
            self.counts.tokens += row.num_sampled
            self.counts.drafts += row.num_sampled - 1
            self.counts.accepted_drafts += row.accepted - 1
            uid, computed = row.admitted.uid, self.counts.computed_by
            computed[uid] += row.accepted
            self._reached[uid] = max(row.start + row.accepted, self._reached.get(uid, 0))

    def _possible_lengths(self, uid: int, stream: ExpectedTokens) -> tuple[int, ...]:
        """Return how many tokens the request may have at the launch of a row or an admission.

        They include the tokens of the request's last row. But if the request was aborted or retracted while that row
        was in flight, the scheduler has discarded them.
        """
        before, after = self._last_run.get(uid, (stream.num_prompt_tokens, stream.num_prompt_tokens))
        return (after,) if self.depth == 1 else (before, after)

    # ---- messages and counts -------------------------------------------------------------------------

    def _describe(self, content: int) -> str:
        """Describe the KV of a location in words, given its prefix hash."""
        if content == 0:
            return "a KV location that was never written"
        for uid, stream in self._streams.items():
            contents = stream.hashes[1 : stream.num_known + 1] ^ np.uint64(stream.namespace)
            for length in np.flatnonzero(contents == np.uint64(content))[:1]:
                return f"the KV of request {uid} at position {length}"
        return "KV that belongs to no request's prefix"

    def _count(self, rows: list[Row]) -> None:
        counts = self.counts
        tokens = sum(row.end - row.start for row in rows)
        counts.steps += 1
        counts.rows += len(rows)
        counts.tokens += tokens
        counts.max_rows = max(counts.max_rows, len(rows))
        counts.max_tokens = max(counts.max_tokens, tokens)
        for row in rows:
            uid, computed = row.admitted.uid, counts.computed_by
            rejected = row.num_sampled - row.accepted
            computed[uid] = computed.get(uid, 0) + row.end - row.start - rejected
            if row.verifies:
                counts.drafts += row.num_sampled - 1
                counts.accepted_drafts += row.accepted - 1
            reached = self._reached.get(uid, 0)
            counts.prompt_tokens += max(0, min(row.end, row.stream.num_prompt_tokens) - row.start)
            counts.recomputed += max(0, min(row.end, reached) - row.start)
            self._reached[uid] = max(row.end - rejected, reached)


def _of(pages: RowPages) -> str:
    """Return the words that name the KV group in a message; none for the first group, which most models have alone."""
    return f" (KV group {pages.group})" if pages.group else ""
