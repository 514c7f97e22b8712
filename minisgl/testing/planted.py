"""Bugs that real servers had, as patches of the real scheduler, each with a small workload that reveals the bug.

They test the checkers of schedulers: the simulated engine, the trace checker, a student's auditor. A checker must find
each bug, and must report nothing on the same workload without the bug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from msgspec import structs

from minisgl.core import (
    I32,
    Admission,
    Bools,
    EngineSpec,
    Logprobs,
    Output,
    Req,
    SamplingParams,
    Step,
    StepResult,
    TokenMasks,
)
from minisgl.plugins.cache.prefix import PrefixCacheManager
from minisgl.plugins.constraint import manager as constraints
from minisgl.plugins.constraint.manager import ConstraintManager
from minisgl.plugins.speculation import adaptive
from minisgl.plugins.speculation.adaptive import AdaptiveSpeculation, verification
from minisgl.scheduler import steps
from minisgl.scheduler.base import Budget, Plan, Running, Waiting
from minisgl.scheduler.cache_manager import AdmissionCost, CacheManager
from minisgl.scheduler.page_allocator import OwnerTable, PageAllocator
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.steps import Ended, InFlightStep, ResultReader
from minisgl.testing.drive import Drive, Job, make_plugin
from minisgl.testing.small import no_lookahead
from minisgl.testing.traced import traced
from minisgl.testing.truth import WITH_DEAD_ENDS, expected_output

__all__ = ["PLANTED", "ArrivalOrderPolicy", "Planted", "planted"]

Bug = AbstractContextManager[Any]


class ArrivalOrderPolicy:
    """A policy that plans as many tokens as the budget grants: running requests, then waiting ones by arrival.

    It does not wait until another request has computed a shared prefix.
    """

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        rows = [(r.uid, n) for r in running if (n := budget.grant(r, r.num_remaining_tokens or 1))]
        for w in waiting:
            if not (n := budget.grant(w, w.num_tokens - w.num_cached_tokens)):
                break
            rows.append((w.uid, n))
        return Plan(rows)


@dataclass(frozen=True)
class Planted:
    """A bug, and a workload that reveals it.

    - ``plant``: returns a context in which the scheduler has the bug.
    - ``clients``: the requests of the workload.
    - ``num_pages``, ``cache``, ``max_running_requests``: options of the workload's engine.
    - ``oracle``: part of the message with which the simulated engine, the page allocator or `Drive` reports the bug.
    - ``rule``: the rule of `minisgl.trace.violation` that the run's trace breaks. It is "reply" if a trace does not
      contain what the bug changes: the trace then shows that the run broke off.
    - ``drafts``, ``rounds``: the options of `Drive`, for a workload with speculation. With several rounds, rows get as
      many drafts as they may.
    """

    plant: Callable[[], Bug]
    clients: Sequence[Job]
    num_pages: int
    oracle: str
    rule: str
    cache: str = "radix"
    max_running_requests: int = 4
    drafts: tuple[int, int, int] | None = None
    rounds: int = 1

    def run(self, trace: Path | None = None) -> Drive:
        """Run the workload and return its `Drive`. Record a trace to the path ``trace`` if it is given.

        The scheduler has the bug only inside the context `planted`. Inside it, raise the error that reports
        the bug.
        """
        spec = EngineSpec(
            page_size=4,
            num_pages=self.num_pages,
            max_running_requests=self.max_running_requests,
            max_seq_len=64,
            vocab_size=50,
        )
        cache = make_plugin("cache", self.cache, page_size=4)
        with ExitStack() as stack:
            make = Drive if trace is None else lambda *args, **kw: stack.enter_context(traced(trace, *args, **kw))
            drive = make(
                spec,
                cache,
                ArrivalOrderPolicy(),
                thorough=False,
                drafts=self.drafts,
                rounds=self.rounds,
                full_drafts=self.rounds > 1,
            )
            drive.run(self.clients)
        return drive


@contextmanager
def planted(*bugs: Callable[[], Bug]) -> Iterator[None]:
    """Give the scheduler the bugs while the context is open.

    Admission also reserves no pages for the future tokens of requests, so that decode runs out of pages.
    """
    with no_lookahead(), ExitStack() as stack:
        for bug in bugs:
            stack.enter_context(bug())
        yield


# ---- the bugs --------------------------------------------------------------------------------------------


def pages_freed_in_flight() -> Bug:
    """Patch the allocator: a retired page is free at once, although a launched step may still write to it."""

    def retire(self: PageAllocator, pages: Any, owner: Any, after: int) -> None:
        OwnerTable.retire(self, pages, owner, self.last_read_step)

    return patch.object(PageAllocator, "retire", retire)


def pool_rows_freed_in_flight() -> Bug:
    """Patch the allocator: a retired request-pool row is free at once, although a step may still write to it."""

    real = OwnerTable.retire

    def retire(self: OwnerTable, ids: Any, owners: Any, after: int) -> None:
        real(self, ids, owners, after if isinstance(self, PageAllocator) else self.last_read_step)

    return patch.object(OwnerTable, "retire", retire)


def duplicates_freed_before_remap() -> Bug:
    """Patch the cache manager: duplicates of cached pages are retired, but the page table still points to them."""
    real = PrefixCacheManager._replace_duplicates

    def replace(self: PrefixCacheManager, req: Req, *inserted: Any) -> None:
        updates, row = list(self._page_table_updates), self.request_table.page_table[req.req_pool_idx].copy()
        real(self, req, *inserted)
        self._page_table_updates, self.request_table.page_table[req.req_pool_idx] = updates, row

    return patch.object(PrefixCacheManager, "_replace_duplicates", replace)


def double_release_on_abort() -> Bug:
    """Patch the scheduler: an abort retires the request's pages, and the end of the request retires them again."""
    real = Scheduler.abort_request

    def abort(self: Scheduler, uid: int) -> None:
        req = self.requests.get(uid)
        if req is not None and req.req_pool_idx >= 0:
            pages = self.request_table.pages_of(req)[req.num_cached_pages :]
            real(self, uid)
            self.cache_manager._retire([(uid, pages)])
        else:
            real(self, uid)

    return patch.object(Scheduler, "abort_request", abort)


def admission_in_tokens() -> Bug:
    """Patch admission: it rounds the tokens of a request down to pages, although the last page is needed too."""

    def cost(self: CacheManager, req: Req) -> AdmissionCost:
        return AdmissionCost((len(req) - len(self.match(req).pages) * self.spec.page_size) // self.spec.page_size, 0)

    return patch.object(CacheManager, "admission_cost", cost)


def evictable_before_locked() -> Bug:
    """Patch admission: cached pages that the request is about to lock are still counted as evictable for it."""
    real = CacheManager.admission_cost

    def cost(self: CacheManager, req: Req) -> AdmissionCost:
        right = real(self, req)
        return AdmissionCost(right.pages - self.match(req).unlocked, right.growth)

    return patch.object(CacheManager, "admission_cost", cost)


def step_shares_memory() -> Bug:
    """Patch the scheduler: num_computed_tokens of a step is a view of the scheduler's array, which changes later."""
    real = Scheduler._build

    def build(self: Scheduler, rows: Sequence[tuple[int, int]]) -> tuple[Step, list[Req]]:
        step, reqs = real(self, rows)
        first = int(step.req_pool_indices[0])
        if np.array_equal(step.req_pool_indices, np.arange(first, first + step.rows)):
            step = structs.replace(
                step, num_computed_tokens=self.request_table.num_computed_tokens[first : first + step.rows]
            )
        return step, reqs

    return patch.object(Scheduler, "_build", build)


def unlock_forgotten() -> Bug:
    """Patch the cache manager: the cached prefix of a request that ended stays locked."""
    return patch.object(PrefixCacheManager, "free_retired", CacheManager.free_retired)


def pages_lost() -> Bug:
    """Patch the cache manager: the last page of a request is not retired when the request ends."""
    real = CacheManager._retire

    def retire(self: CacheManager, owned: Sequence[tuple[int, Any]], rows: Any = None) -> None:
        real(self, owned if rows is None else [(uid, pages[:-1]) for uid, pages in owned], rows)

    return patch.object(CacheManager, "_retire", retire)


def late_token_kept() -> Bug:
    """Patch the scheduler: a token in flight when its request lost its pool row goes to the row's next admission."""
    real = Scheduler._process_result

    def process(self: Scheduler) -> None:
        step = self.in_flight[0]
        now = self.request_table.admission_order[step.step.req_pool_indices]
        self.in_flight[0] = step._replace(admission_orders=now)
        real(self)

    return patch.object(Scheduler, "_process_result", process)


# ---- bugs of speculation, late masks and scores ------------------------------------------------------------


def rejected_token_cached() -> Bug:
    """Patch the reading of results: all positions of a verification row count as computed if its request ends."""
    real = ResultReader.append

    def append(self: ResultReader, launched: InFlightStep, result: StepResult, out: Output) -> tuple[Bools, Ended]:
        gained, ended = real(self, launched, result, out)
        for row, req in enumerate(launched.reqs):
            if any(req is other for other, _ in ended):
                self.request_table.num_computed_tokens[req.req_pool_idx] = launched.ends[row]
        return gained, ended

    return patch.object(ResultReader, "append", append)


def accepted_ignored() -> Bug:
    """Patch the reading of results: all sampled tokens of a row count, those after a rejected draft too."""
    real = ResultReader.append

    def append(self: ResultReader, launched: InFlightStep, result: StepResult, out: Output) -> tuple[Bools, Ended]:
        return real(self, launched, result._replace(accepted=launched.step.num_sampled_tokens.copy()), out)

    return patch.object(ResultReader, "append", append)


def draft_pages_freed_in_flight() -> Bug:
    """Patch the scheduler: pages that only drafts need are free as soon as the step is launched."""
    real = Scheduler._record_launch

    def record(self: Scheduler, step: Step, reqs: list[Req]) -> None:
        real(self, step, reqs)
        table, size = self.request_table, self.spec.page_size
        for row in step.verification_rows:
            index = reqs[row].req_pool_idx
            needed = -(-int(table.num_computed_tokens[index]) // size)
            pages = table.page_table[index, needed : table.num_pages[index]].copy()
            table.num_pages[index] = needed
            self.cache_manager.allocator.retire(pages, reqs[row].uid, after=-1)

    return patch.object(Scheduler, "_record_launch", record)


def stop_in_run_missed() -> Bug:
    """Patch the reading of results: only the last token of an accepted run is compared with the stop tokens."""

    def last_only(req: Req, run: Sequence[int]) -> int | None:
        return len(run) - 1 if run[-1] in req.stop_ids else None

    return patch.object(verification, "first_stop", last_only)


def rejected_token_in_history() -> Bug:
    """Patch the admission: the penalties of a request that is admitted again count one token too many."""
    real = steps._admission

    def admission(req: Req, with_tokens: bool) -> Admission:
        right = real(req, with_tokens)
        if right.output_ids is None or not len(right.output_ids):
            return right
        return structs.replace(right, output_ids=np.append(right.output_ids, right.output_ids[-1]))

    return patch.object(steps, "_admission", admission)


def logprobs_shifted() -> Bug:
    """Patch the reading of results: each token of a run has the log-probability of the token before it."""
    real = steps.add_logprobs

    def add(out: Output, entries: Sequence[Logprobs] | None, first: int, count: int) -> None:
        real(out, entries if entries is None else [entries[0], *entries][:count], first, count)

    return patch.object(steps, "add_logprobs", add)


def result_after_abort_kept() -> Bug:
    """Patch the scheduler: the run of a verification row whose request was aborted goes to the row's next request."""
    real = Scheduler._process_result

    def process(self: Scheduler) -> None:
        launched = self.in_flight[0]
        if launched.step.num_verify:
            now = self.request_table.admission_order[launched.step.req_pool_indices]
            self.in_flight[0] = launched._replace(admission_orders=now)
        real(self)

    return patch.object(Scheduler, "_process_result", process)


def _repeat_last(array: I32, count: int = 1) -> I32:
    """Return ``array`` followed by its last ``count`` entries."""
    return np.concatenate((array, array[-count:]))


def same_row_twice() -> Bug:
    """Patch the scheduler: a request whose drafts do not fit into one row gets a second row in the same step."""
    real = Scheduler._build

    def build(self: Scheduler, rows: Sequence[tuple[int, int]]) -> tuple[Step, list[Req]]:
        step, reqs = real(self, rows)
        if step.num_verify and step.num_verify + step.num_decode == step.rows:
            wrong = structs.replace(
                step,
                req_pool_indices=_repeat_last(step.req_pool_indices),
                num_computed_tokens=_repeat_last(step.num_computed_tokens),
                num_scheduled_tokens=_repeat_last(step.num_scheduled_tokens),
                num_sampled_tokens=_repeat_last(step.num_sampled_tokens),
                num_verify=step.num_verify + 1,
                input_ids=_repeat_last(step.input_ids, int(step.num_scheduled_tokens[-1])),
            )
            return wrong, [*reqs, reqs[-1]]
        return step, reqs

    return patch.object(Scheduler, "_build", build)


@contextmanager
def masks_of_the_step_before() -> Iterator[None]:
    """Patch the scheduler: the masks of a step are made at its launch, before the result of the step before is read."""
    real, real_masks = Scheduler._launch, constraints.token_masks
    made: dict[int, tuple[Step, Any]] = {}  # by id of the step; the reference keeps the id from being used again

    def launch(self: Scheduler) -> bool:
        launched = real(self)
        if launched and (flight := self.in_flight[-1]).step.late_sampling:
            made[id(flight.step)] = flight.step, real_masks(flight, self.spec.vocab_size)
        return launched

    def early_masks(launched: InFlightStep, *args: Any) -> Any:
        return made[id(launched.step)][1]

    with patch.object(constraints, "token_masks", early_masks), patch.object(Scheduler, "_launch", launch):
        yield


def masks_shifted() -> Bug:
    """Patch the scheduler: the mask of each draft is also that of the position after it."""
    real = constraints.token_masks

    def shifted(launched: InFlightStep, vocab_size: int) -> Any:
        masks, dead_ends = real(launched, vocab_size)
        verified = np.isin(masks.positions, masks.positions + 1) & (launched.step.num_verify > 0)
        bits = masks.bits.copy()
        bits[verified] = masks.bits[np.flatnonzero(verified) - 1]
        return TokenMasks(masks.positions, bits), dead_ends

    return patch.object(constraints, "token_masks", shifted)


def rejected_draft_in_grammar() -> Bug:
    """Patch the reading of results: a grammar is also told of the first rejected draft."""
    real = ConstraintManager.append

    def append(
        self: ConstraintManager, results: ResultReader, launched: InFlightStep, result: StepResult, out: Output
    ) -> tuple[Bools, Ended]:
        gained, ended = real(self, results, launched, result, out)
        step = launched.step
        ends = np.cumsum(step.num_scheduled_tokens) - step.num_scheduled_tokens
        for row in step.verification_rows:
            req, count = launched.reqs[row], int(result.accepted[row])
            if gained[row] and req.constraint is not None and count < step.num_sampled_tokens[row]:
                req.constraint.advance([int(step.input_ids[ends[row] + count])])
        return gained, ended

    return patch.object(ConstraintManager, "append", append)


def discarded_token_in_grammar() -> Bug:
    """Patch the reading of results: a grammar is also told of a token that is discarded, after a retraction."""
    real = ConstraintManager.append

    def append(
        self: ConstraintManager, results: ResultReader, launched: InFlightStep, result: StepResult, out: Output
    ) -> tuple[Bools, Ended]:
        dead_ends = self.dead_ends.get(launched.step.id, {})
        gained, ended = real(self, results, launched, result, out)
        for row in np.flatnonzero(launched.step.sample & ~gained).tolist():
            req = launched.reqs[row]
            if req.constraint is not None and row not in dead_ends:
                req.constraint.advance([int(result.tokens[row, 0])])
        return gained, ended

    return patch.object(ConstraintManager, "append", append)


def _dead_ends(change: Callable[[dict[int, int]], dict[int, int]]) -> Bug:
    """Patch the scheduler: it sees the dead ends that ``change`` makes of the right ones."""
    real = constraints.token_masks

    def changed(launched: InFlightStep, vocab_size: int) -> Any:
        masks, dead_ends = real(launched, vocab_size)
        return masks, change(dead_ends)

    return patch.object(constraints, "token_masks", changed)


def dead_end_missed() -> Bug:
    """Patch the scheduler: where a grammar allows no token, any token counts."""
    return _dead_ends(lambda right: {})


def dead_end_of_a_draft() -> Bug:
    """Patch the scheduler: a grammar that allows no token after a draft ends the request, also without the draft."""
    return _dead_ends(lambda right: dict.fromkeys(right, 0))


# ---- bugs of verification in rounds ------------------------------------------------------------------------


def pages_of_one_round() -> Bug:
    """Patch the number of rounds: a step of several rounds gets the pages of its first round only."""

    def num_rounds(self: AdaptiveSpeculation, cache_manager: CacheManager, *args: Any) -> Any:
        with patch.object(adaptive, "allocate_draft_pages", lambda manager, rows, ends: ends):
            return real(self, cache_manager, *args)

    real = AdaptiveSpeculation.num_rounds
    return patch.object(AdaptiveSpeculation, "num_rounds", num_rounds)


def tokens_of_one_row_width() -> Bug:
    """Patch the reading of results: of all rounds together, only as many tokens count as one round can give."""
    real = ResultReader.append

    def append(self: ResultReader, launched: InFlightStep, result: StepResult, out: Output) -> tuple[Bools, Ended]:
        step, accepted = launched.step, result.accepted.copy()
        result.accepted[:] = np.minimum(accepted, step.num_sampled_tokens)
        gained, ended = real(self, launched, result, out)
        if step.rounds > 1:
            rows = step.req_pool_indices[gained]
            self.request_table.num_computed_tokens[rows] = (step.num_computed_tokens + accepted)[gained]
        return gained, ended

    return patch.object(ResultReader, "append", append)


def next_step_after_first_round() -> Bug:
    """Patch the reading of results: the next step starts from the last token of the first round."""
    real = ResultReader.append

    def append(self: ResultReader, launched: InFlightStep, result: StepResult, out: Output) -> tuple[Bools, Ended]:
        gained, ended = real(self, launched, result, out)
        if result.rounds is not None:
            step = launched.step
            ends = step.num_computed_tokens + np.minimum(result.rounds[0], result.accepted)
            self.request_table.num_computed_tokens[step.req_pool_indices[gained]] = ends[gained]
        return gained, ended

    return patch.object(ResultReader, "append", append)


# ---- the workloads ---------------------------------------------------------------------------------------------


def job(
    uid: int,
    length: int,
    answer: int = 8,
    arrive: int = 0,
    abort: int | None = None,
    first: int = 0,
    grammar: int | None = None,
    **params: Any,
) -> Job:
    """Build a greedy request. Of two prompts with the same ``first`` token, the shorter is a prefix of the longer."""
    prompt = [(first + i * i) % 50 for i in range(length)]
    return Job(uid, prompt, SamplingParams(max_tokens=answer, temperature=0.0, **params), arrive, abort, grammar)


def next_turn(earlier: Job, uid: int, arrive: int) -> Job:
    """Build a request whose prompt is the prompt and the answer of ``earlier``, and one token more."""
    answer = expected_output(earlier.request, 50).tokens
    return Job(uid, [*earlier.prompt, *answer, 1], earlier.params, arrive)


SPREAD = [job(1, 9), job(2, 6, first=9), job(3, 14, first=17, arrive=2), job(4, 9, first=25, arrive=3)]
ABORTED = [job(1, 9, 12, abort=3), job(2, 9, 12, arrive=1, first=9), job(3, 13, 6, arrive=2, first=17)]
SAME_PREFIX = [job(1, 12, 16), job(2, 12, 16), job(3, 17, 9, arrive=2, first=9), job(4, 13, 6, arrive=3, first=25)]
CACHED_PROMPT = [job(1, 12, 4), job(2, 9, 4, arrive=9, first=9), job(3, 24, 4, arrive=9)]

VERIFIED = [
    job(1, 9, 20),
    job(2, 6, 17, first=9),
    job(3, 14, 13, first=17, arrive=2),
    job(4, 9, 12, first=25, arrive=3),
]
STOPPED = [
    job(uid, 9, 24, first=first, stop_token_ids=tuple(range(0, 50, 6))) for uid, first in ((1, 0), (2, 9), (3, 17))
]
SCORED = [replace(j, params=structs.replace(j.params, logprobs=0)) for j in VERIFIED]
PENALISED = [replace(j, params=structs.replace(j.params, presence_penalty=0.5)) for j in VERIFIED]
GRAMMARS = [replace(j, grammar=j.uid) for j in VERIFIED]
DEAD_ENDS = [replace(j, grammar=WITH_DEAD_ENDS) for j in VERIFIED]
FIRST_TURNS = [job(uid, 6 + uid, 24, first=8 * uid, stop_token_ids=tuple(range(0, 50, 3))) for uid in range(1, 5)]
ABORTED_WHILE_VERIFYING = [replace(j, abort=j.arrive + 3 + j.uid) for j in VERIFIED] + [
    job(5, 9, 9, first=30, arrive=5)
]

PLANTED: dict[str, Planted] = {
    "pages freed while a step is in flight": Planted(
        pages_freed_in_flight, ABORTED, 8, "page-in-flight", "page-owner", cache="naive"
    ),
    "a request-pool row reused while a late token write is pending": Planted(
        pool_rows_freed_in_flight, ABORTED, 20, "row-in-flight", "request-pool", max_running_requests=2
    ),
    "duplicates freed before remap": Planted(
        duplicates_freed_before_remap, SAME_PREFIX, 30, "page-retired", "page-table"
    ),
    "a double release on abort": Planted(double_release_on_abort, ABORTED, 20, "cannot retire page", "page-owner"),
    "admission that counts tokens instead of pages": Planted(
        admission_in_tokens, SPREAD, 9, "pages requested", "admission", cache="naive"
    ),
    "cached pages counted as evictable before they are locked": Planted(
        evictable_before_locked, CACHED_PROMPT, 8, "pages requested", "admission"
    ),
    "a Step that shares memory with the scheduler": Planted(step_shares_memory, SPREAD, 30, "step-changed", "stream"),
    "a prefix that stays locked": Planted(unlock_forgotten, SPREAD, 30, "have users", "page-count"),
    "a page that is never retired": Planted(pages_lost, SPREAD, 30, "pages are lost", "page-count"),
    "a late token kept for another admission": Planted(late_token_kept, ABORTED, 20, "usage: ", "reply"),
    "KV of a rejected draft that is cached": Planted(
        rejected_token_cached,
        [*FIRST_TURNS, *(next_turn(j, j.uid + 4, 20 + j.uid) for j in FIRST_TURNS)],
        60,
        "kv-content",
        "prefix",
        drafts=(4, 40, 0),
    ),
    "tokens after a rejected draft that count": Planted(
        accepted_ignored, VERIFIED, 30, "promise 8", "row", drafts=(4, 60, 0)
    ),
    "pages of drafts freed while the step is in flight": Planted(
        draft_pages_freed_in_flight, VERIFIED, 30, "kv-content", "page-count", drafts=(4, 60, 0)
    ),
    "a stop token inside an accepted run that is missed": Planted(
        stop_in_run_missed, STOPPED, 40, "expected tokens", "reply", drafts=(4, 95, 0)
    ),
    "a penalty that counts a token too many": Planted(
        rejected_token_in_history, PENALISED, 14, "admission", "reply", drafts=(4, 60, 0)
    ),
    "log-probabilities shifted by one": Planted(
        logprobs_shifted, SCORED, 30, "log-probability", "reply", drafts=(4, 90, 0)
    ),
    "the result of an aborted verification that counts": Planted(
        result_after_abort_kept, ABORTED_WHILE_VERIFYING, 30, "usage: ", "reply", drafts=(4, 90, 0)
    ),
    "a request-pool row twice in a step": Planted(
        same_row_twice, VERIFIED, 30, "row-shape", "request-pool", drafts=(4, 60, 0)
    ),
    "pages of one round for a step of several": Planted(
        pages_of_one_round, VERIFIED, 60, "table-missing", "page-table", drafts=(2, 60, 0), rounds=3
    ),
    "tokens of later rounds that are not read": Planted(
        tokens_of_one_row_width, VERIFIED, 60, "promise 8", "row", drafts=(2, 60, 0), rounds=3
    ),
    "a step that starts after the first round of the step before": Planted(
        next_step_after_first_round, VERIFIED, 60, "start", "row", drafts=(2, 60, 0), rounds=3
    ),
    "masks of the step before": Planted(masks_of_the_step_before, GRAMMARS, 30, "mask", "reply"),
    "masks shifted by one": Planted(masks_shifted, GRAMMARS, 30, "mask", "reply", drafts=(4, 90, 0)),
    "a rejected draft in a grammar": Planted(
        rejected_draft_in_grammar, GRAMMARS, 30, "mask", "reply", drafts=(4, 60, 0)
    ),
    "a discarded token in a grammar": Planted(discarded_token_in_grammar, GRAMMARS, 14, "mask", "reply"),
    "a dead end of a grammar that is missed": Planted(
        dead_end_missed, DEAD_ENDS, 30, "expected tokens", "reply", drafts=(4, 90, 0)
    ),
    "a dead end after a draft that ends the request": Planted(
        dead_end_of_a_draft, DEAD_ENDS, 30, "promise 8", "reply", drafts=(4, 50, 0)
    ),
}
"""Description of each bug → the bug and its workload."""
