"""Builds a Step from the rows that the planner chose: kinds of rows, draft tokens, input tokens, pages, prompt scores.

All rows belong to running requests: the scheduler has admitted the waiting ones before. The builder allocates the pages
that decode rows and draft tokens need. It launches nothing and appends no tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from minisgl.core import I32, PENDING, Admission, Bools, PromptRange, Req, Step
from minisgl.scheduler.base import Constraint, Speculation
from minisgl.scheduler.cache_manager import CacheManager
from minisgl.scheduler.planner import PolicyError

_DECODE, _VERIFY, _PREFILL = range(3)  # kinds of rows, in the order of a step

Drafts = dict[int, list[int]]
"""Row number → the row's draft tokens, at least one."""


class StepBuilder:
    """The builder of one scheduler's steps.

    ``speculation`` gives drafts, or is None; ``constraints`` are the scheduler's grammars, by uid.
    """

    def __init__(
        self,
        cache_manager: CacheManager,
        speculation: Speculation | None,
        constraints: dict[int, Constraint],
    ):
        self.cache_manager, self.request_table = cache_manager, cache_manager.request_table
        self.speculation, self.constraints = speculation, constraints
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
        num_decode, num_verify = int(decodes.sum()), 0
        drafts: Drafts = {}
        if num_decode:
            rows_without_page = table.needing_page(req_pool_indices[decodes])
            if len(rows_without_page):
                self.cache_manager.allocate_decode_pages(rows_without_page)
            if self.speculation is not None:
                drafts = self._propose(self.speculation, step_id, reqs, req_pool_indices, decodes)
                num_verify = len(drafts)
                num_decode -= num_verify
        if max(num_decode, num_verify) not in (0, len(reqs)):  # rows of several kinds
            kinds = np.where(decodes, _DECODE, _PREFILL)
            kinds[list(drafts)] = _VERIFY
            order = np.argsort(kinds, kind="stable")
            req_pool_indices, num_tokens = req_pool_indices[order], num_tokens[order]
            reqs = [reqs[i] for i in order.tolist()]
            drafts = {row: drafts[i] for row, i in enumerate(order.tolist()) if i in drafts}
        starts = table.num_computed_tokens[req_pool_indices]
        num_sampled = (starts + num_tokens >= table.num_prefill_tokens[req_pool_indices]).astype(np.int32)
        for row, tokens in drafts.items():
            num_tokens[row] = num_sampled[row] = 1 + len(tokens)
        late_sampling = bool(self.constraints) and any(
            req.uid in self.constraints for req, n in zip(reqs, num_sampled.tolist(), strict=True) if n
        )
        rounds = 1
        if self.speculation is not None and may_repeat and num_verify == len(reqs) and not late_sampling:
            rounds = self.speculation.num_rounds(self.cache_manager, reqs, req_pool_indices, starts, num_tokens)
        step = Step(
            id=step_id,
            req_pool_indices=req_pool_indices,
            num_computed_tokens=starts,
            num_scheduled_tokens=num_tokens,
            num_sampled_tokens=num_sampled,
            num_decode=num_decode,
            num_verify=num_verify,
            input_ids=_input_ids(reqs, starts, num_tokens, num_decode, drafts),
            page_table_updates=self.cache_manager.pop_page_table_updates(),
            admissions=tuple(_admission(req, self._keeps_tokens) for req in admitted),
            prompt_logprobs=_prompt_ranges(reqs, starts, num_tokens, num_decode + num_verify),
            late_sampling=late_sampling,
            rounds=rounds,
        )
        return step, reqs

    def _propose(
        self, speculation: Speculation, step_id: int, reqs: Sequence[Req], req_pool_indices: I32, decodes: Bools
    ) -> Drafts:
        """Ask for drafts of the decode rows, and allocate the pages of their positions.

        A row gets no more drafts than its request may still need, and none whose pages are not free or evictable.
        """
        table = self.request_table
        rows = np.flatnonzero(decodes)
        indices = req_pool_indices[rows]
        positions = table.num_computed_tokens[indices] + 1  # of the first drafts, after the rows' own tokens
        limits = np.maximum(table.max_len[indices] - 1 - positions, 0)
        proposed = speculation.propose(step_id, [reqs[i] for i in rows.tolist()], indices, positions, limits)
        counts = np.minimum(np.array([len(tokens) for tokens in proposed], np.int32), limits)
        if counts.sum() > speculation.max_draft_tokens:
            counts = np.diff(np.minimum(np.cumsum(counts), speculation.max_draft_tokens), prepend=0)
        drafting = np.flatnonzero(counts)
        if not len(drafting):
            return {}
        kept = {i: list(proposed[i][: counts[i]]) for i in drafting.tolist()}
        for tokens in kept.values():
            if min(tokens) < 0 or max(tokens) >= self.cache_manager.spec.vocab_size:
                raise PolicyError(f"the proposer drafted {tokens}: a token is not in the vocabulary")
        positions, counts = positions[drafting], counts[drafting].astype(np.int32)
        counts = self.cache_manager.allocate_draft_pages(indices[drafting], positions + counts) - positions
        pairs = zip(rows[drafting].tolist(), kept.values(), counts.tolist(), strict=True)
        return {row: tokens[:count] for row, tokens, count in pairs if count > 0}


def _input_ids(reqs: Sequence[Req], starts: I32, num_tokens: I32, num_decode: int, drafts: Drafts) -> I32:
    """Return the input ids of all rows in order: PENDING and the drafts in decode and verification rows, or a chunk."""
    first_chunk = num_decode + len(drafts)
    continuing = [PENDING] * num_decode
    for row in range(num_decode, first_chunk):
        continuing += (PENDING, *drafts[row])
    ids = np.array(continuing, np.int32)
    if first_chunk == len(reqs):
        return ids
    chunks = [reqs[row].tokens()[starts[row] : starts[row] + num_tokens[row]] for row in range(first_chunk, len(reqs))]
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
