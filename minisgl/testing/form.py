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
    arrays = [step.slots, step.starts, step.counts, step.sample, step.tokens, *step.table]
    for seat in step.seats:
        arrays += [array for array in (seat.prompt, seat.output) if array is not None]
    for array in arrays:
        fingerprint.update(np.ascontiguousarray(array).tobytes())
    return fingerprint.digest()


def check_form(step: Step, spec: EngineSpec) -> None:
    """Raise `SimViolation` ("row-shape", "table-write") where the arrays don't fit each other or the engine."""
    _check_rows(step, spec)
    slots, columns, pages = step.table
    if not len(slots) == len(columns) == len(pages):
        raise SimViolation("table-write", "slots, columns and pages differ in length", step=step.id)
    most_columns = -(-spec.max_len // spec.page_size)
    for name, values, limit in (
        ("slot", slots, spec.max_slots),
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
            slot = int(step.slots[row]) if row is not None else None
            raise SimViolation("row-shape", text, step=step.id, row=row, slot=slot)

    need(rows > 0, "the step has no rows")
    for name in ("slots", "starts", "counts", "tokens"):
        need(getattr(step, name).dtype == np.int32, f"{name} is {getattr(step, name).dtype}, not int32")
    need(step.sample.dtype == np.bool_, f"sample is {step.sample.dtype}, not bool")
    for name in ("starts", "counts", "sample"):
        need(len(getattr(step, name)) == rows, f"{len(getattr(step, name))} {name} for {rows} slots")
    need(0 <= step.num_decode <= rows, f"num_decode is {step.num_decode} of {rows} rows")
    for row in np.flatnonzero(step.counts < 1)[:1]:
        need(False, f"computes {step.counts[row]} tokens", int(row))
    for row in np.flatnonzero(step.counts[: step.num_decode] != 1)[:1]:
        need(False, f"a decode row computes {step.counts[row]} tokens", int(row))
    total = int(step.counts.sum())
    need(len(step.tokens) == total, f"{len(step.tokens)} input tokens for {total} positions")
    need(bool((step.tokens[step.num_decode :] >= 0).all()), "a row that is not a decode row has a negative token")
    for row in np.flatnonzero((step.slots < 0) | (step.slots >= spec.max_slots))[:1]:
        need(False, f"slot {step.slots[row]} is not one of {spec.max_slots}", int(row))
    slots, first = np.unique(step.slots, return_index=True)
    if len(slots) != rows:
        need(False, "two rows have this slot", int(np.setdiff1d(np.arange(rows), first)[0]))
