"""Turns decode rows of a step into verification rows, and reads the result of a step that has such rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import structs

from minisgl.core import PENDING, Bools, Output, Req, Step, StepResult
from minisgl.scheduler import steps
from minisgl.scheduler.steps import Ended, InFlightStep, ResultReader


def verify(step: Step, reqs: list[Req], drafts: Sequence[Sequence[int]]) -> tuple[Step, list[Req]]:
    """Return the step in which the decode rows with drafts verify them, and the request of each of its rows.

    ``drafts[i]`` are the drafts of decode row i. The verification rows follow the other decode rows.
    """
    first_chunk = step.num_decode
    verifying = [tokens for tokens in drafts if tokens]
    num_decode = first_chunk - len(verifying)
    indices, computed = step.req_pool_indices, step.num_computed_tokens
    if num_decode:
        order = [*sorted(range(first_chunk), key=lambda row: len(drafts[row]) > 0), *range(first_chunk, step.rows)]
        indices, computed, reqs = indices[order], computed[order], [reqs[row] for row in order]
    # A decode row computes and samples one token, so these need no new order.
    num_scheduled, num_sampled = step.num_scheduled_tokens.copy(), step.num_sampled_tokens.copy()
    counts = [1 + len(tokens) for tokens in verifying]
    num_scheduled[num_decode:first_chunk] = num_sampled[num_decode:first_chunk] = counts
    ids = [PENDING] * num_decode
    for tokens in verifying:
        ids += (PENDING, *tokens)
    changed = structs.replace(
        step,
        req_pool_indices=indices,
        num_computed_tokens=computed,
        num_scheduled_tokens=num_scheduled,
        num_sampled_tokens=num_sampled,
        num_decode=num_decode,
        num_verify=len(verifying),
        input_ids=np.concatenate((np.array(ids, np.int32), step.input_ids[first_chunk:])),
    )
    return changed, reqs


def append_runs(results: ResultReader, launched: InFlightStep, result: StepResult, gained: Bools, out: Output) -> Ended:
    """Append the accepted tokens of each row in ``gained``: the result of a step with verification rows.

    The tokens of a row count up to the first stop token: ``result.accepted`` is reduced to them. The row's positions up
    to the last accepted draft have the right KV; the next row of the request begins after them.
    """
    step = launched.step
    rows = np.flatnonzero(gained).tolist()
    ended: Ended = []
    tokens, accepted = result.tokens.tolist(), result.accepted.tolist()
    for i in rows:
        req, run = launched.reqs[i], tokens[i][: accepted[i]]
        stop = first_stop(req, run)
        if stop is not None:
            run = run[: stop + 1]
            ended.append((req, "stop"))
        elif len(req) + len(run) >= req.max_len:
            ended.append((req, "length"))
        result.accepted[i] = len(run)
        if result.logprobs is not None:
            steps.add_logprobs(out, result.logprobs[i], len(out.uids), len(run))
        req.output_ids.extend(run)
        out.uids.extend([req.uid] * len(run))
        out.tokens.extend(run)
        results.counts["output_tokens"] += len(run)
    computed: Any = launched.ends - step.num_sampled_tokens + result.accepted
    results.request_table.num_computed_tokens[step.req_pool_indices[rows]] = computed[rows]
    return ended


def first_stop(req: Req, run: Sequence[int]) -> int | None:
    """Return the index of the first token in ``run`` that ends the request, or None."""
    return next((k for k, token in enumerate(run) if token in req.stop_ids), None)
