"""What recurrent states have absorbed, as far as the events tell: for each slot, a prefix of a request.

A step loads copies before its forward pass, and saves copies within it. Steps take effect in the order of their launch,
so the launch of a step is enough to know them: no result has to be read. `minisgl.trace.contents` has the hashes of the
requests' tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minisgl.core import EngineSpec
from minisgl.trace import events as ev
from minisgl.trace.state import Request

__all__ = ["RecurrentStates"]

PrefixHash = Callable[[Request, int], int | None]
"""(request, length) → the hash of its first tokens, or None if some of them are not known yet."""


@dataclass(frozen=True)
class _Absorbed:
    """A state that has absorbed the first ``length`` tokens of a request, in the admission number ``order``.

    ``digest`` is the hash of these tokens, or None if the last of them was not known at the launch. If the tokens after
    the first ``certain`` ones were drafts, the state can be taken back to any length from there on.
    """

    uid: int
    order: int
    length: int
    digest: int | None
    certain: int

    def __str__(self) -> str:
        return f"the first {self.length} tokens of request {self.uid}" if self.length else "nothing"


_EMPTY = _Absorbed(-1, -1, 0, None, 0)


class RecurrentStates:
    """The states of all slots. The first slots belong to the request-pool rows, the later ones hold saved copies."""

    def __init__(self, spec: EngineSpec):
        self._first_copy = spec.max_running_requests + 1
        self._slots: dict[int, _Absorbed | None] = {}  # None: written before the trace began
        self._known = True  # whether a slot that is not in the dict is empty

    def forget(self) -> None:
        """Begin late: what the slots hold is not known."""
        self._slots, self._known = {}, False

    def launch(
        self, batch: ev.Batch, copies: ev.States | None, reqs: list[Request], prefix_hash: PrefixHash
    ) -> tuple[Request | None, str] | None:
        """Copy and absorb what a step does; ``reqs`` has the request of each row.

        Return the first row's request that goes on with another state than that of its own prefix, and words for what
        is wrong, or None.
        """
        by_row = dict(zip(batch.req_pool_indices, reqs, strict=True))
        for slot, row in copies.loads if copies is not None else ():
            if slot < self._first_copy:
                text = f"the state in slot {slot} is loaded, but copies have the slots from {self._first_copy} on"
                return by_row.get(row), text
            self._slots[row] = self._get(slot)
        for i, (req, row) in enumerate(zip(reqs, batch.req_pool_indices, strict=True)):
            start, end = batch.num_computed_tokens[i], batch.num_computed_tokens[i] + batch.num_scheduled_tokens[i]
            if start and not self._is_own(self._get(row), req, start, prefix_hash):
                return req, f"the row goes on after {start} tokens, but its state has absorbed {self._get(row)}"
            for at, position, slot in copies.saves if copies is not None else ():
                if at != i:
                    continue
                if not (start < position <= end and slot >= self._first_copy):
                    text = (
                        f"the state at position {position} is saved in slot {slot}; the row computes {start} to {end}"
                    )
                    return req, f"{text}, and copies have the slots from {self._first_copy} on"
                digest = prefix_hash(req, position)
                self._slots[slot] = _Absorbed(req.uid, req.admission_order, position, digest, position)
            verifies = batch.num_decode <= i < batch.num_decode + len(batch.drafts)
            end, certain = (start + batch.rounds * (end - start), start + 1) if verifies else (end, end)
            self._slots[row] = _Absorbed(req.uid, req.admission_order, end, None, certain)
        return None

    def _get(self, slot: int) -> _Absorbed | None:
        return self._slots.get(slot, _EMPTY if self._known else None)

    def _is_own(self, found: _Absorbed | None, req: Request, start: int, prefix_hash: PrefixHash) -> bool:
        """Return whether a state may be that of the first ``start`` tokens of a request."""
        if found is None:
            return True
        if not found.certain <= start <= found.length:
            return False
        return found.order == req.admission_order or found.digest in (None, prefix_hash(req, start))
