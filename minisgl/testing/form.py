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
        step.sample,
        step.input_ids,
        *step.page_table_updates,
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

    need(rows > 0, "the step has no rows")
    for name in ("req_pool_indices", "num_computed_tokens", "num_scheduled_tokens", "input_ids"):
        need(getattr(step, name).dtype == np.int32, f"the dtype of {name} is {getattr(step, name).dtype}, not int32")
    need(step.sample.dtype == np.bool_, f"the dtype of sample is {step.sample.dtype}, not bool")
    for name in ("num_computed_tokens", "num_scheduled_tokens", "sample"):
        need(
            len(getattr(step, name)) == rows,
            f"{name} has {len(getattr(step, name))} entries, but the step has {rows} rows",
        )
    need(0 <= step.num_decode <= rows, f"num_decode is {step.num_decode}, but the step has {rows} rows")
    for row in np.flatnonzero(step.num_scheduled_tokens < 1)[:1]:
        need(False, f"the row computes {step.num_scheduled_tokens[row]} tokens; expected at least 1", int(row))
    for row in np.flatnonzero(step.num_scheduled_tokens[: step.num_decode] != 1)[:1]:
        need(False, f"a decode row computes {step.num_scheduled_tokens[row]} tokens; expected 1", int(row))
    total = int(step.num_scheduled_tokens.sum())
    need(len(step.input_ids) == total, f"the step has {len(step.input_ids)} input tokens for {total} positions")
    need(
        bool((step.input_ids[step.num_decode :] >= 0).all()),
        "a prefill row has a negative input token; only decode rows may use PENDING",
    )
    for row in np.flatnonzero((step.req_pool_indices < 0) | (step.req_pool_indices >= spec.max_running_requests))[:1]:
        seen = f"req_pool_idx is {step.req_pool_indices[row]}"
        need(False, f"{seen}; expected 0 to {spec.max_running_requests - 1}", int(row))
    indices, first = np.unique(step.req_pool_indices, return_index=True)
    if len(indices) != rows:
        need(False, "two rows of the step have this req_pool_idx", int(np.setdiff1d(np.arange(rows), first)[0]))
