"""Checks the shape of a Step: lengths, dtypes and bounds of its arrays.

These checks need only the sizes of the engine. Checks that depend on earlier steps are in `minisgl.testing.sim`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NoReturn

import numpy as np

from minisgl.core import Bools, EngineSpec, Step
from minisgl.testing.violation import SimViolation

__all__ = ["check_form", "digest"]


def digest(step: Step) -> bytes:
    """Return a hash (16 bytes) of all arrays of a step. A different hash later means that an array was changed."""
    fingerprint = hashlib.blake2b(digest_size=16)
    arrays = [
        step.req_pool_indices,
        step.num_computed_tokens,
        step.num_scheduled_tokens,
        step.num_sampled_tokens,
        step.input_ids,
        *step.page_table_updates,
        *(step.state_loads or ()),
        *(step.state_saves or ()),
        *(wanted.targets for wanted in step.prompt_logprobs),
    ]
    for admission in step.admissions:
        arrays += [array for array in (admission.prompt_ids, admission.output_ids) if array is not None]
    for array in arrays:
        fingerprint.update(np.ascontiguousarray(array).tobytes())
    return fingerprint.digest()


def check_form(step: Step, spec: EngineSpec) -> None:
    """Raise `SimViolation` ("row-shape", "table-write") if arrays of the step do not fit each other or the engine."""
    _check_rows(step, spec)
    indices, columns, pages = step.page_table_updates
    if not len(indices) == len(columns) == len(pages):
        lengths = f"{len(indices)} request-pool rows, {len(columns)} columns and {len(pages)} pages"
        raise SimViolation("table-write", f"page_table_updates has {lengths}; the lengths differ", step=step.id)
    num_columns = len(spec.groups) * spec.num_columns
    for name, values, limit in (
        ("req_pool_idx", indices, spec.max_running_requests),
        ("column", columns, num_columns),
        ("page", pages, spec.num_pages),
    ):
        if (i := _first((values < 0) | (values >= limit))) is not None:
            text = f"page table update {i} has {name} {values[i]}; expected 0 to {limit - 1}"
            raise SimViolation("table-write", text, step=step.id, req_pool_idx=int(indices[i]), page=int(pages[i]))


def _check_rows(step: Step, spec: EngineSpec) -> None:
    rows, counts, sampled = step.rows, step.num_scheduled_tokens, step.num_sampled_tokens

    def fail(text: str, row: int | None = None) -> NoReturn:
        req_pool_idx = int(step.req_pool_indices[row]) if row is not None else None
        raise SimViolation("row-shape", text, step=step.id, row=row, req_pool_idx=req_pool_idx)

    if rows <= 0:
        fail("the step has no rows")
    _check_arrays(step, fail)
    first_chunk = step.num_continuing
    if min(step.num_decode, step.num_verify) < 0 or first_chunk > rows:
        fail(f"num_decode is {step.num_decode} and num_verify is {step.num_verify}, but the step has {rows} rows")
    if (row := _first(counts < 1)) is not None:
        fail(f"the row computes {counts[row]} tokens; expected at least 1", row)
    if (row := _first(counts[: step.num_decode] != 1)) is not None:
        fail(f"a decode row computes {counts[row]} tokens; expected 1", row)
    if (row := _first(sampled[: step.num_decode] != 1)) is not None:
        fail(f"a decode row samples {sampled[row]} tokens; expected 1", row)
    if step.num_verify:
        verify = slice(step.num_decode, first_chunk)
        if (row := _first((counts != sampled)[verify] | (sampled < 2)[verify])) is not None:
            row += step.num_decode
            seen = f"a verification row computes {counts[row]} tokens and samples {sampled[row]}"
            fail(f"{seen}; expected the same, from 2 on", row)
    if step.rounds != 1:
        alike = step.num_verify == rows and len(set(counts.tolist())) == 1
        if step.rounds < 1 or not alike or step.late_sampling:
            fail(f"the step has {step.rounds} rounds, but not only verification rows with equally many drafts")
    if (row := _first((sampled[first_chunk:] < 0) | (sampled[first_chunk:] > 1))) is not None:
        row += first_chunk
        fail(f"a prefill chunk samples {sampled[row]} tokens; expected 0 or 1", row)
    _check_input(step, first_chunk, fail)
    outside = (step.req_pool_indices < 0) | (step.req_pool_indices >= spec.max_running_requests)
    if (row := _first(outside)) is not None:
        seen = f"req_pool_idx is {step.req_pool_indices[row]}"
        fail(f"{seen}; expected 0 to {spec.max_running_requests - 1}", row)
    indices = step.req_pool_indices.tolist()
    if len(set(indices)) != rows:
        row = next(i for i, index in enumerate(indices) if index in indices[:i])
        fail("two rows of the step have this req_pool_idx", row)


def _check_arrays(step: Step, fail: Callable[[str], NoReturn]) -> None:
    """Check the dtypes of the arrays, and the lengths of those with an entry a row."""
    per_row = ("num_computed_tokens", "num_scheduled_tokens", "num_sampled_tokens")
    for name in (*per_row, "req_pool_indices", "input_ids"):
        array = getattr(step, name)
        if array.dtype != np.int32:
            fail(f"the dtype of {name} is {array.dtype}, not int32")
        if name in per_row and len(array) != step.rows:
            fail(f"{name} has {len(array)} entries, but the step has {step.rows} rows")


def _check_input(step: Step, first_chunk: int, fail: Callable[..., NoReturn]) -> None:
    """Check the number of input tokens, which of them may be PENDING, and the wanted prompt log-probabilities."""
    counts = step.num_scheduled_tokens
    total = int(counts.sum())
    if len(step.input_ids) != total:
        fail(f"the step has {len(step.input_ids)} input tokens for {total} positions")
    may_be_pending = np.zeros(total, bool)
    may_be_pending[(np.cumsum(counts) - counts)[:first_chunk]] = True
    if not (may_be_pending | (step.input_ids >= 0)).all():
        fail("an input token is negative; only the first token of a decode row or of a verification row may be PENDING")
    for wanted in step.prompt_logprobs:
        row, start, end = wanted.row, wanted.first_position, wanted.first_position + len(wanted.targets)
        inside = first_chunk <= row < step.rows and bool(
            step.num_computed_tokens[row] <= start < end <= step.num_computed_tokens[row] + counts[row]
        )
        if not inside:
            fail(f"prompt_logprobs asks for positions {start} to {end - 1} of row {row}, which is no such chunk")


def _first(wrong: Bools) -> int | None:
    """Return the index of the first true element, or None."""
    return int(wrong.argmax()) if wrong.any() else None
