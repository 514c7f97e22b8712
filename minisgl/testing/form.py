"""Checks the shape of a Step: lengths, dtypes and bounds of its arrays.

These checks need only the sizes of the engine. Checks that depend on earlier steps are in `minisgl.testing.sim`.
"""

from __future__ import annotations

import hashlib

import numpy as np

from minisgl.core import EngineSpec, Step
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
    num_columns = -(-spec.max_seq_len // spec.page_size)
    for name, values, limit in (
        ("req_pool_idx", indices, spec.max_running_requests),
        ("column", columns, num_columns),
        ("page", pages, spec.num_pages),
    ):
        for i in np.flatnonzero((values < 0) | (values >= limit))[:1]:
            text = f"page table update {i} has {name} {values[i]}; expected 0 to {limit - 1}"
            raise SimViolation("table-write", text, step=step.id, req_pool_idx=int(indices[i]), page=int(pages[i]))


def _check_rows(step: Step, spec: EngineSpec) -> None:
    rows = step.rows

    def need(ok: bool, text: str, row: int | None = None) -> None:
        if not ok:
            req_pool_idx = int(step.req_pool_indices[row]) if row is not None else None
            raise SimViolation("row-shape", text, step=step.id, row=row, req_pool_idx=req_pool_idx)

    per_row = ("num_computed_tokens", "num_scheduled_tokens", "num_sampled_tokens")
    need(rows > 0, "the step has no rows")
    for name in (*per_row, "req_pool_indices", "input_ids"):
        need(getattr(step, name).dtype == np.int32, f"the dtype of {name} is {getattr(step, name).dtype}, not int32")
    for name in per_row:
        need(
            len(getattr(step, name)) == rows,
            f"{name} has {len(getattr(step, name))} entries, but the step has {rows} rows",
        )
    first_chunk = step.num_decode + step.num_verify
    need(
        min(step.num_decode, step.num_verify) >= 0 and first_chunk <= rows,
        f"num_decode is {step.num_decode} and num_verify is {step.num_verify}, but the step has {rows} rows",
    )
    for row in np.flatnonzero(step.num_scheduled_tokens < 1)[:1]:
        need(False, f"the row computes {step.num_scheduled_tokens[row]} tokens; expected at least 1", int(row))
    for row in np.flatnonzero(step.num_scheduled_tokens[: step.num_decode] != 1)[:1]:
        need(False, f"a decode row computes {step.num_scheduled_tokens[row]} tokens; expected 1", int(row))
    counts, sampled = step.num_scheduled_tokens, step.num_sampled_tokens
    for row in np.flatnonzero(sampled[: step.num_decode] != 1)[:1]:
        need(False, f"a decode row samples {sampled[row]} tokens; expected 1", int(row))
    for row in step.num_decode + np.flatnonzero(
        (counts != sampled)[step.num_decode : first_chunk] | (sampled < 2)[step.num_decode : first_chunk]
    ):
        text = (
            f"a verification row computes {counts[row]} tokens and samples {sampled[row]}; expected the same, from 2 on"
        )
        need(False, text, int(row))
    for row in first_chunk + np.flatnonzero((sampled[first_chunk:] < 0) | (sampled[first_chunk:] > 1))[:1]:
        need(False, f"a prefill chunk samples {sampled[row]} tokens; expected 0 or 1", int(row))
    total = int(counts.sum())
    need(len(step.input_ids) == total, f"the step has {len(step.input_ids)} input tokens for {total} positions")
    may_be_pending = np.zeros(total, bool)
    may_be_pending[(np.cumsum(counts) - counts)[:first_chunk]] = True
    need(
        bool((may_be_pending | (step.input_ids >= 0)).all()),
        "an input token is negative; only the first token of a decode row or of a verification row may be PENDING",
    )
    for wanted in step.prompt_logprobs:
        row, start, end = wanted.row, wanted.first_position, wanted.first_position + len(wanted.targets)
        inside = first_chunk <= row < rows and bool(
            step.num_computed_tokens[row] <= start < end <= step.num_computed_tokens[row] + counts[row]
        )
        need(inside, f"prompt_logprobs asks for positions {start} to {end - 1} of row {row}, which is no such chunk")
    for row in np.flatnonzero((step.req_pool_indices < 0) | (step.req_pool_indices >= spec.max_running_requests))[:1]:
        seen = f"req_pool_idx is {step.req_pool_indices[row]}"
        need(False, f"{seen}; expected 0 to {spec.max_running_requests - 1}", int(row))
    indices, first = np.unique(step.req_pool_indices, return_index=True)
    if len(indices) != rows:
        need(False, "two rows of the step have this req_pool_idx", int(np.setdiff1d(np.arange(rows), first)[0]))
