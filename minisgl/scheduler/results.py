"""Appends the tokens of a step's result to its requests: one token a row, or the accepted run of a verification row.

The result of a row is discarded if its request has ended or was retracted since the launch. This module decides which
requests end with their new tokens; the scheduler ends them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from minisgl.core import I32, Bools, FinishReason, Logprobs, Output, Req, Step, StepResult
from minisgl.scheduler.base import Constraint
from minisgl.scheduler.request_table import RequestTable

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


class ResultReader:
    """Reads the results of one scheduler's steps.

    ``constraints`` are the grammars of open requests by uid, ``counts`` the scheduler's counters; both are updated.
    """

    def __init__(self, request_table: RequestTable, constraints: dict[int, Constraint], counts: dict[str, int]):
        self.request_table, self.constraints, self.counts = request_table, constraints, counts

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
        append = self._append_runs if step.num_verify else self._append_tokens
        return gained, append(launched, result, gained, out)

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
                _add_logprobs(out, result.logprobs[i], first + k, 1)
        if self.constraints:
            ending = {req.uid for req, _ in ended}
            for req, token in zip(reqs, tokens, strict=True):
                if req.uid not in ending:
                    self._advance_constraint(req, [token])
        self.counts["output_tokens"] += len(rows)
        return ended

    def _append_runs(self, launched: InFlightStep, result: StepResult, gained: Bools, out: Output) -> Ended:
        """Append the accepted tokens of each row in ``gained``: the result of a step with verification rows.

        The tokens of a row count up to the first stop token. The row's positions up to the last accepted draft have the
        right KV; the next row of the request begins after them.
        """
        step = launched.step
        rows = np.flatnonzero(gained).tolist()
        ended: Ended = []
        tokens, accepted = result.tokens.tolist(), result.accepted.tolist()
        for i in rows:
            req, run = launched.reqs[i], tokens[i][: accepted[i]]
            stop = _first_stop(req, run)
            if stop is not None:
                run = run[: stop + 1]
                result.accepted[i] = len(run)
                ended.append((req, "stop"))
            elif len(req) + len(run) >= req.max_len:
                ended.append((req, "length"))
            else:
                self._advance_constraint(req, run)
            if result.logprobs is not None:
                _add_logprobs(out, result.logprobs[i], len(out.uids), len(run))
            req.output_ids.extend(run)
            out.uids.extend([req.uid] * len(run))
            out.tokens.extend(run)
            self.counts["output_tokens"] += len(run)
        computed = launched.ends - step.num_sampled_tokens + result.accepted
        self.request_table.num_computed_tokens[step.req_pool_indices[rows]] = computed[rows]
        return ended

    def _advance_constraint(self, req: Req, tokens: list[int]) -> None:
        constraint = self.constraints.get(req.uid)
        if constraint is not None:
            constraint.advance(tokens)

    def _add_prompt_logprobs(self, launched: InFlightStep, result: StepResult, valid: Bools, out: Output) -> None:
        """Add the log-probabilities of prompt tokens to the output."""
        for wanted, entries in zip(launched.step.prompt_logprobs, result.prompt_logprobs, strict=True):
            if valid[wanted.row]:
                req = launched.reqs[wanted.row]
                req.num_prompt_logprobs += len(entries)
                out.prompt_logprobs.setdefault(req.uid, []).extend(entries)


def _first_stop(req: Req, run: Sequence[int]) -> int | None:
    """Return the index of the first token in ``run`` that ends the request, or None."""
    return next((k for k, token in enumerate(run) if token in req.stop_ids), None)


def _add_logprobs(out: Output, entries: Sequence[Logprobs] | None, first: int, count: int) -> None:
    """Add the log-probabilities of a row's tokens, which are ``count`` entries of the output from ``first`` on."""
    if entries is not None:
        out.logprobs.update(enumerate(entries[:count], first))
