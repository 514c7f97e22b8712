"""What a step must look like whatever it computes: lengths, types, bounds. Knows the engine's sizes and no state."""

from __future__ import annotations

import hashlib

import numpy as np

from minisgl.core import EngineSpec, Step
from minisgl.testing.violation import SimViolation

__all__ = ["check_form", "digest"]


def digest(step: Step) -> bytes:
    """A fingerprint of all the arrays that a step carries: another one later means that somebody changed them."""
    fingerprint = hashlib.blake2b(digest_size=16)
    arrays = [
        step.req_pool_indices,
        step.num_computed_tokens,
        step.num_scheduled_tokens,
        step.sample,
        step.input_ids,
        *step.page_table_updates,
    ]
    for seat in step.admissions:
        arrays += [array for array in (seat.prompt_ids, seat.output_ids) if array is not None]
    for array in arrays:
        fingerprint.update(np.ascontiguousarray(array).tobytes())
    return fingerprint.digest()


def check_form(step: Step, spec: EngineSpec) -> None:
    """Raise `SimViolation` ("row-shape", "table-write") where the arrays don't fit each other or the engine."""
    _check_rows(step, spec)
    slots, columns, pages = step.page_table_updates
    if not len(slots) == len(columns) == len(pages):
        raise SimViolation("table-write", "slots, columns and pages differ in length", step=step.id)
    most_columns = -(-spec.max_seq_len // spec.page_size)
    for name, values, limit in (
        ("slot", slots, spec.max_running_requests),
        ("column", columns, most_columns),
        ("page", pages, spec.num_pages),
    ):
        for i in np.flatnonzero((values < 0) | (values >= limit))[:1]:
            text = f"write {i} has {name} {values[i]}; there are {limit}"
            raise SimViolation("table-write", text, step=step.id, slot=int(slots[i]), page=int(pages[i]))


def _check_rows(step: Step, spec: EngineSpec) -> None:
    rows = step.rows

    def need(ok: bool, text: str, row: int | None = None) -> None:
        if not ok:
            slot = int(step.req_pool_indices[row]) if row is not None else None
            raise SimViolation("row-shape", text, step=step.id, row=row, slot=slot)

    need(rows > 0, "the step has no rows")
    for name in ("slots", "starts", "counts", "tokens"):
        need(getattr(step, name).dtype == np.int32, f"{name} is {getattr(step, name).dtype}, not int32")
    need(step.sample.dtype == np.bool_, f"sample is {step.sample.dtype}, not bool")
    for name in ("starts", "counts", "sample"):
        need(len(getattr(step, name)) == rows, f"{len(getattr(step, name))} {name} for {rows} slots")
    need(0 <= step.num_decode <= rows, f"num_decode is {step.num_decode} of {rows} rows")
    for row in np.flatnonzero(step.num_scheduled_tokens < 1)[:1]:
        need(False, f"computes {step.num_scheduled_tokens[row]} tokens", int(row))
    for row in np.flatnonzero(step.num_scheduled_tokens[: step.num_decode] != 1)[:1]:
        need(False, f"a decode row computes {step.num_scheduled_tokens[row]} tokens", int(row))
    total = int(step.num_scheduled_tokens.sum())
    need(len(step.input_ids) == total, f"{len(step.input_ids)} input tokens for {total} positions")
    need(bool((step.input_ids[step.num_decode :] >= 0).all()), "a row that is not a decode row has a negative token")
    for row in np.flatnonzero((step.req_pool_indices < 0) | (step.req_pool_indices >= spec.max_running_requests))[:1]:
        need(False, f"slot {step.req_pool_indices[row]} is not one of {spec.max_running_requests}", int(row))
    slots, first = np.unique(step.req_pool_indices, return_index=True)
    if len(slots) != rows:
        need(False, "two rows have this slot", int(np.setdiff1d(np.arange(rows), first)[0]))
