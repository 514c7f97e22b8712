"""Recurrent states in the simulated engine: what each request-pool row's state has absorbed, as the hash of a prefix.

A row that starts at position 0 starts with an empty state. Any other row goes on with the state that is there, so it
must have absorbed exactly the row's prefix: each token once, in order, and no token of another request. A row absorbs
all tokens that it computes, draft tokens too: nothing takes a rejected one out again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from minisgl.core import EngineSpec
from minisgl.testing.sim_records import Row
from minisgl.testing.violation import SimViolation

__all__ = ["SimStates"]


class SimStates:
    """The states of an engine of the sizes ``spec``. ``describe`` says in words what a hash is the content of."""

    def __init__(self, spec: EngineSpec, describe: Callable[[int], str]):
        self._describe = describe
        self._absorbed = np.zeros(spec.max_running_requests, np.uint64)

    def check(self, step: int, row: Row) -> None:
        """Raise `SimViolation` unless the row goes on with the state of its own prefix."""
        content = int(self._absorbed[row.req_pool_idx])
        if row.start and content != int(row.stream.hashes[row.start]) ^ row.stream.namespace:
            found = self._describe(content) if content else "nothing"
            text = f"the row goes on with a state that has absorbed {found}; expected its own prefix"
            raise SimViolation("state", text, **row.at(step, position=row.start))

    def absorb(self, row: Row, prefix: int) -> None:
        """Absorb the tokens of a row. ``prefix`` is the hash of all tokens up to its last one."""
        self._absorbed[row.req_pool_idx] = prefix ^ row.stream.namespace
