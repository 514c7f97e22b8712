"""Conversion of the arrays that a step left on the device into a `StepResult`. Runs on the host, in plain numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from minisgl.core import I32, I64, Logprobs, Step, StepResult
from minisgl.engine.inputs import SamplePlan

F32 = npt.NDArray[np.float32]


def read_result(step: Step, plan: SamplePlan | None, arrays: Mapping[str, npt.NDArray[Any]]) -> StepResult:
    """Return the result of ``step``.

    ``arrays`` are by name: the fields of `Sampled` (none if no row samples), and ``accepted`` int64 with one entry for
    each row that samples (only if a row verifies). ``plan`` is the plan of sampling; None if no row samples.
    """
    tokens, accepted = _read_tokens(step, arrays)
    logprobs = None
    if plan is not None and "chosen" in arrays:
        entries = read_logprobs(plan, arrays["chosen"], arrays["top"], arrays["top_ids"])
        logprobs = _read_row_logprobs(step, accepted, entries)
    return StepResult(step.id, tokens, accepted, logprobs)


def _read_tokens(step: Step, arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[I32, I32]:
    """Return ``tokens`` and ``accepted`` of a `StepResult`. Tokens that do not count are 0."""
    counts = step.num_sampled_tokens
    if "accepted" not in arrays:
        sampled = arrays.get("tokens")
        if sampled is not None and len(sampled) == step.rows:
            return sampled.astype(np.int32)[:, None], counts.copy()
        tokens = np.zeros((step.rows, 1), np.int32)
        if sampled is not None:
            tokens[step.sample, 0] = sampled
        return tokens, counts.copy()
    accepted = np.zeros(step.rows, np.int32)
    accepted[step.sample] = arrays["accepted"]
    tokens = np.zeros((step.rows, counts.max()), np.int32)
    k = np.arange(tokens.shape[1])
    tokens[k < counts[:, None]] = arrays["tokens"]
    tokens[k >= accepted[:, None]] = 0
    return tokens, accepted


def read_logprobs(plan: SamplePlan, chosen: F32, top: F32, top_ids: I64) -> list[Logprobs | None]:
    """Convert the log-probabilities of a `Sampled`, as host arrays, into one entry for each row of the plan.

    The entry is None for a row that did not ask for log-probabilities.
    """
    assert plan.alternatives is not None
    entries: list[Logprobs | None] = [None] * len(plan.alternatives)
    for i, row in enumerate(np.flatnonzero(plan.alternatives >= 0)):
        k = int(plan.alternatives[row])
        entries[row] = Logprobs(float(chosen[i]), tuple(top_ids[i, :k].tolist()), tuple(top[i, :k].tolist()))
    return entries


def _read_row_logprobs(
    step: Step, accepted: I32, entries: list[Logprobs | None]
) -> tuple[tuple[Logprobs, ...] | None, ...]:
    """Return the log-probabilities of each row's accepted tokens. ``entries`` has one for each sampled position."""
    ends = np.cumsum(step.num_sampled_tokens)
    rows: list[tuple[Logprobs, ...] | None] = []
    for begin, count in zip((ends - step.num_sampled_tokens).tolist(), accepted.tolist(), strict=True):
        row = tuple(entry for entry in entries[begin : begin + count] if entry is not None)
        rows.append(row or None)
    return tuple(rows)
