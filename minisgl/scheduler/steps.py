"""Builds the next Step from the rows that the planner chose, and gives the tokens of a step's result to its requests.

`StepBuilder`: kinds of rows, input tokens, pages, prompt scores. All rows belong to running requests: the scheduler has
admitted the waiting ones before. The builder allocates the pages of decode rows, and `Speculation.with_drafts` those of
draft tokens.

`ResultReader`: one token a row; `Speculation.append` reads the accepted run of a verification row. The result of a row
is discarded if its request has ended or was retracted since the launch. The reader decides which requests end with
their new tokens; the scheduler ends them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from minisgl.core import (
    I32,
    PENDING,
    Admission,
    Bools,
    FinishReason,
    Logprobs,
    Output,
    PromptRange,
    Req,
    Step,
    StepResult,
)
from minisgl.scheduler.cache_manager import CacheManager
from minisgl.scheduler.request_table import RequestTable

_NO_UPDATES = (np.empty(0, np.int32),) * 3


class StepBuilder:
    """The builder of one scheduler's steps. ``speculation`` gives drafts, or is None: `Scheduler`."""

    def __init__(self, cache_manager: CacheManager, speculation: Any):
        self.cache_manager, self.request_table = cache_manager, cache_manager.request_table
        self.speculation = speculation
        self._with_states = getattr(cache_manager, "with_states", None)  # of a cache that keeps recurrent states
        self._keeps_tokens = speculation is not None and speculation.engine_drafts

    def build(
        self,
        step_id: int,
        reqs: list[Req],
        req_pool_indices: I32,
        num_tokens: I32,
        admitted: Iterable[Req],
        may_repeat: bool = False,
    ) -> tuple[Step, list[Req]]:
        """Return step ``step_id``, and the request of each of its rows.

        ``num_tokens[i]`` is the number of tokens of ``reqs[i]`` in the plan. ``admitted`` are the requests that the
        step admits. With ``may_repeat``, the step may have several rounds.
        """
        table = self.request_table
        decodes = table.num_computed_tokens[req_pool_indices] >= table.num_prefill_tokens[req_pool_indices]
        num_decode = int(decodes.sum())
        self.cache_manager.allocate_step_pages(req_pool_indices, num_tokens)
        if num_decode not in (0, len(reqs)):  # rows of both kinds
            order = np.argsort(~decodes, kind="stable")
            req_pool_indices, num_tokens = req_pool_indices[order], num_tokens[order]
            reqs = [reqs[i] for i in order.tolist()]
        starts = table.num_computed_tokens[req_pool_indices]
        num_sampled = (starts + num_tokens >= table.num_prefill_tokens[req_pool_indices]).astype(np.int32)
        step = Step(
            id=step_id,
            req_pool_indices=req_pool_indices,
            num_computed_tokens=starts,
            num_scheduled_tokens=num_tokens,
            num_sampled_tokens=num_sampled,
            num_decode=num_decode,
            num_verify=0,
            input_ids=_input_ids(reqs, starts, num_tokens, num_decode),
            page_table_updates=_NO_UPDATES,
            admissions=tuple(_admission(req, self._keeps_tokens) for req in admitted),
            prompt_logprobs=_prompt_ranges(reqs, starts, num_tokens, num_decode),
            late_sampling=any(num_sampled[row] for row, req in enumerate(reqs) if req.constraint is not None),
        )
        if num_decode and self.speculation is not None:
            step, reqs = self.speculation.with_drafts(self.cache_manager, step, reqs, may_repeat)
        step = structs.replace(step, page_table_updates=self.cache_manager.pop_page_table_updates())
        return step if self._with_states is None else self._with_states(step, reqs), reqs


def _input_ids(reqs: Sequence[Req], starts: I32, num_tokens: I32, num_decode: int) -> I32:
    """Return the input ids of all rows in order: PENDING in a decode row, or the tokens of a chunk."""
    ids = np.full(num_decode, PENDING, np.int32)
    if num_decode == len(reqs):
        return ids
    chunks = [reqs[row].tokens()[starts[row] : starts[row] + num_tokens[row]] for row in range(num_decode, len(reqs))]
    return np.concatenate((ids, *chunks))


def _admission(req: Req, with_tokens: bool) -> Admission:
    """Return what the engine must know of an admitted request.

    Its tokens are part of it ``with_tokens``, or if a penalty counts them.
    """
    needs_history = with_tokens or req.params.needs_history
    return Admission(
        req.req_pool_idx,
        req.uid,
        req.params,
        req.seed,
        req.prompt_ids.copy() if needs_history else None,
        np.asarray(req.output_ids, np.int32) if needs_history else None,
    )


def _prompt_ranges(reqs: Sequence[Req], starts: I32, num_tokens: I32, first_chunk: int) -> tuple[PromptRange, ...]:
    """Return the positions of the prefill chunks whose logits score tokens of the prompt that a request asked for."""
    ranges = []
    for row in range(first_chunk, len(reqs)):
        req = reqs[row]
        if req.params.prompt_logprobs is None:
            continue
        first = max(int(starts[row]), req.next_prompt_logprob)
        last = min(int(starts[row] + num_tokens[row]), len(req.prompt_ids) - 1)
        if first < last:
            targets = req.prompt_ids[first + 1 : last + 1].copy()
            ranges.append(PromptRange(row, first, targets, req.params.prompt_logprobs))
    return tuple(ranges)


# ---- results ---------------------------------------------------------------------------------------


Ended = list[tuple[Req, FinishReason]]
"""Requests that end, and why."""


class InFlightStep(NamedTuple):
    """A launched step whose result has not been read. ``reqs`` and ``admission_orders`` have one entry for each row."""

    step: Step
    reqs: list[Req]
    admission_orders: I32  # the admission that the row belongs to; a later admission may reuse the request-pool row

    @property
    def ends(self) -> I32:
        """For each row, the position that follows the last one that the row computes: int32 ``[rows]``."""
        ends: I32 = self.step.num_computed_tokens + self.step.num_scheduled_tokens
        return ends

    @property
    def certain_ends(self) -> I32:
        """The same, but of a verification row only its first token counts: the drafts may be rejected."""
        step, ends = self.step, self.ends
        verify = slice(step.num_decode, step.num_continuing)
        ends[verify] = step.num_computed_tokens[verify] + 1
        return ends

    def reqs_of(self, gained: Bools) -> list[Req | None]:
        """Return the request of each row, or None if the row did not gain tokens."""
        if gained.all():
            return list(self.reqs)
        return [req if gains else None for req, gains in zip(self.reqs, gained.tolist(), strict=True)]


class ResultReader:
    """Reads the results of one scheduler's steps. ``counts`` are the scheduler's counters, which are updated."""

    def __init__(self, request_table: RequestTable, counts: dict[str, int], speculation: Any = None):
        self.request_table, self.counts, self.speculation = request_table, counts, speculation

    def append(self, launched: InFlightStep, result: StepResult, out: Output) -> tuple[Bools, Ended]:
        """Append the tokens of ``result`` to their requests and to ``out``.

        Return whether each row gained tokens, bool ``[rows]``, and the requests that end with them. In a row whose run
        has a stop token, ``result.accepted`` is reduced to the tokens that count.
        """
        step = launched.step
        # A row gains tokens only if the request still runs in the same admission: not ended, not retracted.
        valid: Bools = self.request_table.admission_order[step.req_pool_indices] == launched.admission_orders
        if step.prompt_logprobs:
            self._add_prompt_logprobs(launched, result, valid, out)
        gained = valid & step.sample
        if step.num_verify and self.speculation is not None:
            return gained, self.speculation.append(self, launched, result, gained, out)
        return gained, self._append_tokens(launched, result, gained, out)

    def _append_tokens(self, launched: InFlightStep, result: StepResult, gained: Bools, out: Output) -> Ended:
        """Append one token to the request of each row in ``gained``: the result of a step without verification rows."""
        reqs = launched.reqs
        is_last = (launched.ends + 1 >= self.request_table.max_len[launched.step.req_pool_indices]).tolist()
        tokens = result.tokens[:, 0].tolist()
        rows: Sequence[int] = range(len(tokens))
        ended: Ended = []
        if not gained.all():
            rows = np.flatnonzero(gained).tolist()
            reqs, tokens = [reqs[i] for i in rows], [tokens[i] for i in rows]
            is_last = [is_last[i] for i in rows]
        out.uids.extend([req.uid for req in reqs])
        out.tokens.extend(tokens)
        for req, token, last in zip(reqs, tokens, is_last, strict=True):
            req.output_ids.append(token)
            if token in req.stop_ids:
                ended.append((req, "stop"))
            elif last:
                ended.append((req, "length"))
        if result.logprobs is not None:
            first = len(out.uids) - len(rows)
            for k, i in enumerate(rows):
                add_logprobs(out, result.logprobs[i], first + k, 1)
        self.counts["output_tokens"] += len(rows)
        return ended

    def _add_prompt_logprobs(self, launched: InFlightStep, result: StepResult, valid: Bools, out: Output) -> None:
        """Add the log-probabilities of prompt tokens to the output."""
        for wanted, entries in zip(launched.step.prompt_logprobs, result.prompt_logprobs, strict=True):
            if valid[wanted.row]:
                req = launched.reqs[wanted.row]
                req.num_prompt_logprobs += len(entries)
                out.prompt_logprobs.setdefault(req.uid, []).extend(entries)


NO_TOKEN = (
    "The grammar of the request allows no token after this text, or it has grown too large. With bad_words or "
    "allowed_token_ids, they may forbid the tokens that it allows."
)
"""The error of a request whose next mask allows no token."""


def add_logprobs(out: Output, entries: Sequence[Logprobs] | None, first: int, count: int) -> None:
    """Add the log-probabilities of a row's tokens, which are ``count`` entries of the output from ``first`` on."""
    if entries is not None:
        out.logprobs.update(enumerate(entries[:count], first))


# ---- counts ----------------------------------------------------------------------------------------

COUNTS = (
    "steps",
    "prefill_tokens",
    "decode_tokens",
    "cached_tokens",
    "prompt_tokens",
    "cached_prompt_tokens",
    "verification_rows",  # this one and the next two are 0 here: `Speculation.stats` counts them
    "draft_tokens",
    "accepted_draft_tokens",
    "output_tokens",
    "retractions",
    "finished_stop",
    "finished_length",
    "finished_abort",
    "finished_error",
)


PER_POSITION = "accepted_draft_tokens_per_pos_"
"""The beginning of the names of the scheduler's counts by a draft's place in its row, with which the names end."""


class Counters(dict[str, int]):
    """The counts of one scheduler by name, from its start on. `Scheduler.stats` returns them."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(COUNTS, 0))

    def admitted(self, req: Req, num_cached_tokens: int) -> None:
        """Count an admission. A retracted request is admitted again, but its prompt counts only once."""
        self["cached_tokens"] += num_cached_tokens
        if req.first_admission:
            self["prompt_tokens"] += len(req.prompt_ids)
            self["cached_prompt_tokens"] += num_cached_tokens

    def launched(self, step: Step) -> None:
        """Count a step and its tokens. Drafts count neither as tokens of decoding nor as tokens of prompts."""
        self["steps"] += 1
        self["decode_tokens"] += step.num_continuing
        self["prefill_tokens"] += len(step.input_ids) - step.num_decode
        if step.num_verify:
            self["prefill_tokens"] -= int(step.num_sampled_tokens[step.num_decode : step.num_continuing].sum())
