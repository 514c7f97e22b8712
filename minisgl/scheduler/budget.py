"""What one step can hold, as a policy is told it.

Pages are counted whole, what a request would lock of the cache is no longer evictable for it, and admission leaves
room for what the running requests will write next (promise 5), so that admitting does not lead to retracting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, overload

from minisgl.scheduler.base import Running, Waiting


class AdmissionCost(NamedTuple):
    """What it takes to seat a waiting request: ``pages`` that must be free or evictable, ``growth`` it needs soon."""

    pages: int
    growth: int


class StepBudget:
    """See `minisgl.scheduler.base.Budget`. ``pages`` are free or evictable; ``reserve`` of them are spoken for."""

    __slots__ = ("admission_cost", "pages", "reserved_pages", "rows", "tokens")

    def __init__(self, tokens: int, rows: int, pages: int, reserve: int, cost: Callable[[int], AdmissionCost]):
        self.tokens, self.rows, self.pages, self.reserved_pages, self.admission_cost = (
            tokens,
            rows,
            pages,
            reserve,
            cost,
        )

    def grant(self, who: Waiting | Running, want: int) -> int:
        """How many of ``want`` tokens fit, and take them off."""
        if isinstance(who, Waiting):
            return self._admit(who, want)
        if who.num_remaining_tokens:  # its pages were taken when it was seated
            granted = max(min(want, who.num_remaining_tokens, self.tokens), 0)
            self.tokens -= granted
            return granted
        if who.num_new_pages > self.pages or want < 1:
            return 0
        if who.num_new_pages:
            self.pages -= who.num_new_pages
            self.reserved_pages -= who.num_new_pages
        if self.tokens:
            self.tokens -= 1
        return 1

    def _admit(self, who: Waiting, want: int) -> int:
        granted = min(want, who.num_tokens - who.num_cached_tokens, self.tokens)
        if granted <= 0 or self.rows == 0:
            return 0
        cost = self.admission_cost(who.uid)
        if cost.pages + max(self.reserved_pages, 0) > self.pages:
            return 0
        self.rows -= 1
        self.tokens -= granted
        self.pages -= cost.pages
        self.reserved_pages += cost.growth
        return granted


class WaitingView(Sequence[Waiting]):
    """The queue as a policy sees it; an entry is worked out when it is first looked at."""

    def __init__(self, size: int, make: Callable[[int], Waiting]):
        self._size = size
        self._make = make
        self._made: list[Waiting] = []

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Waiting: ...
    @overload
    def __getitem__(self, index: slice) -> list[Waiting]: ...
    def __getitem__(self, index: int | slice) -> Waiting | list[Waiting]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._size))]
        if index < 0:
            index += self._size
        if not 0 <= index < self._size:
            raise IndexError(index)
        while len(self._made) <= index:
            self._made.append(self._make(len(self._made)))
        return self._made[index]

    def __iter__(self) -> Iterator[Waiting]:
        for i in range(self._size):
            yield self[i]
