"""Recurrent states in the simulated engine: what each request-pool row's state has absorbed, as the hash of a prefix.

A row that starts at position 0 starts with an empty state. Any other row goes on with the state that is there, so it
must have absorbed exactly the row's prefix: each token once, in order, and no token of another request. A row absorbs
all tokens that it computes. A verification row can be taken back: if the next row in its slot starts within its tokens,
this row goes on with the state before its start. Further slots hold copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minisgl.core import EngineSpec, Step
from minisgl.testing.sim_records import Row
from minisgl.testing.violation import SimViolation

__all__ = ["SimStates"]


class SimStates:
    """The states of an engine of the sizes ``spec``. ``describe`` says in words what a hash is the content of."""

    def __init__(self, spec: EngineSpec, describe: Callable[[int], str]):
        self._describe, self._num_rows = describe, spec.max_running_requests
        self._absorbed: dict[int, int] = {}  # slot -> content; a missing slot is empty
        self._kept: dict[int, dict[int, int]] = {}  # row -> position within its last tokens -> content before it

    def load(self, step: Step) -> None:
        """Copy the states that the step loads into the slots of its rows."""
        for slot, row in zip(*(step.state_loads or ((), ())), strict=True):
            if slot <= self._num_rows or not 0 <= row < self._num_rows:
                text = f"the step loads slot {slot} into slot {row}; expected a copy's slot and a request-pool row"
                raise SimViolation("state", text, step=step.id)
            self._absorbed[int(row)] = self._absorbed.get(int(slot), 0)
            self._kept.pop(int(row), None)

    def save(self, step: Step, rows: Sequence[Row]) -> None:
        """Copy the states that the step saves. A row reaches each of its positions in this step."""
        for index, position, slot in zip(*(step.state_saves or ((), (), ())), strict=True):
            if not (0 <= index < step.rows and slot > self._num_rows):
                text = f"the step saves the state of row {index} in slot {slot}; expected a row and a copy's slot"
                raise SimViolation("state", text, step=step.id)
            row = rows[index]
            if not row.start < position <= row.end:
                text = f"the state at position {position} is saved, but the row gets from {row.start} to {row.end}"
                raise SimViolation("state", text, **row.at(step.id))
            self._absorbed[int(slot)] = int(row.stream.hashes[position]) ^ row.stream.namespace

    def check(self, step: int, row: Row) -> None:
        """Raise `SimViolation` unless the row goes on with the state of its own prefix."""
        content = self._kept.get(row.req_pool_idx, {}).get(row.start, self._absorbed.get(row.req_pool_idx, 0))
        if row.start and content != int(row.stream.hashes[row.start]) ^ row.stream.namespace:
            found = self._describe(content) if content else "nothing"
            text = f"the row goes on with a state that has absorbed {found}; expected its own prefix"
            raise SimViolation("state", text, **row.at(step, position=row.start))

    def absorb(self, row: Row, prefixes: Sequence[int]) -> None:
        """Absorb the tokens of a row. ``prefixes`` are the hashes of all tokens up to each of them."""
        contents = [int(prefix) ^ row.stream.namespace for prefix in prefixes]
        self._absorbed[row.req_pool_idx] = contents[-1]
        self._kept[row.req_pool_idx] = dict(enumerate(contents[:-1], row.start + 1)) if row.verifies else {}
