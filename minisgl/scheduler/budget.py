"""The budget of one step, which a policy asks how many tokens of a request fit, and the lazy view of the waiting queue.

The budget counts whole pages, and it counts the cached pages that a request would lock as not evictable. Admission
keeps pages in reserve for the next tokens of the running requests (promise 5), so that an admission does not soon cause
a retraction. `Reserve` estimates how many tokens a running request will still write, from the lengths of the answers
that ended. A reserve that is too small causes retractions; a reserve that is too large makes batches small.
`StepBudget.grant` cuts a prompt into chunks (chunked prefill; SGLang: `PrefillAdder`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import islice
from math import ceil
from typing import NamedTuple, overload

from minisgl.scheduler.base import Running, Waiting


class AdmissionCost(NamedTuple):
    """The pages that the admission of a waiting request costs."""

    pages: int  # pages that must be free or evictable now
    growth: int  # further pages that the request's next tokens will need soon


RETRACTION_SLACK = 4
"""Tokens for which a retraction frees pages beyond the reserve, for each running request that stays.

The pages of a retracted request may become free only a turn later. The other requests have then grown, and the
admission for which it was retracted must still fit beside the reserve.
"""

PREFILL_SHARE = 0.25
"""Decode rows leave at least this share of a step's tokens, rounded up, to prefill chunks.

Otherwise a step with as many decode rows as tokens computes no prompt, until enough answers have ended.
"""


FIRST_LENGTH = 128.0
"""Length of an answer in tokens that is assumed before any answer has ended."""

SHARE = 1 / 4
"""Share of the mean length of an answer that is reserved for each running request.

An answer has half of its length left on average. But answers end at different times, and each that ends leaves its
pages to the others, so less is needed in reserve.
"""

WINDOW = 32
"""Number of answers over which the mean length is taken, with exponentially decreasing weights."""


class Reserve:
    """The number of tokens for which admission keeps pages free, for each running request.

    It depends only on the answers that ended and on the retractions, so it is the same in every run of the same steps.
    SGLang estimates with its ``new_token_ratio``, which falls with every step and rises after a retraction.
    """

    def __init__(self) -> None:
        self.mean_length = FIRST_LENGTH

    @property
    def num_tokens(self) -> int:
        """Number of tokens to reserve for each running request."""
        return max(round(self.mean_length * SHARE), 1)

    def answer_ended(self, length: int) -> None:
        """Count an answer of ``length`` tokens that was complete."""
        self.mean_length += (length - self.mean_length) / WINDOW

    def pages_ran_out(self) -> None:
        """Raise the estimate, because a request is retracted for lack of pages: the reserve was too small."""
        self.mean_length += self.mean_length / WINDOW


class StepBudget:
    """The scheduler's `minisgl.scheduler.base.Budget`.

    ``tokens`` and ``rows`` are what the step has left. ``pages`` is the number of free or evictable pages, and
    ``reserved_pages`` of them are kept from waiting requests, for the next tokens of running requests.
    ``admission_cost(uid)`` returns the `AdmissionCost` of a waiting request. Decode rows leave ``prefill_tokens`` of
    the tokens to prompts: by default the `PREFILL_SHARE` of ``tokens``, less what prompts were granted.
    ``retractions(uids)`` is what the method of this name calls; None: no request can be retracted.
    """

    __slots__ = ("_retractions", "admission_cost", "pages", "prefill_tokens", "reserved_pages", "rows", "tokens")

    def __init__(
        self,
        tokens: int,
        rows: int,
        pages: int,
        reserved_pages: int,
        admission_cost: Callable[[int], AdmissionCost],
        prefill_tokens: int | None = None,
        retractions: Callable[[Sequence[int]], list[int]] | None = None,
    ):
        self.tokens, self.rows, self.pages, self.reserved_pages = tokens, rows, pages, reserved_pages
        self.admission_cost, self._retractions = admission_cost, retractions
        self.prefill_tokens = ceil(tokens * PREFILL_SHARE) if prefill_tokens is None else prefill_tokens

    def copy(self) -> StepBudget:
        """Return a budget with the same numbers, whose grants do not count for this one."""
        return copy(self)

    def retractions(self, order: Sequence[Waiting | Running]) -> list[int]:
        """Return which running requests of ``order`` must be retracted, so that waiting ones of ``order`` fit."""
        return [] if self._retractions is None else self._retractions([request.uid for request in order])

    def grant(self, request: Waiting | Running, num_tokens: int) -> int:
        """Return how many of ``num_tokens`` tokens of ``request`` fit, and subtract them from the budget."""
        if isinstance(request, Waiting):
            return self._grant_admission(request, num_tokens)
        if request.num_remaining_tokens:  # prefill: all pages of the prompt were allocated at admission
            granted = max(min(num_tokens, request.num_remaining_tokens, self.tokens), 0)
            self._use_prefill_tokens(granted)
            return granted
        if request.num_new_pages > self.pages or num_tokens < 1:
            return 0
        if request.num_new_pages:
            self.pages -= request.num_new_pages
            self.reserved_pages -= request.num_new_pages
        if self.tokens > self.prefill_tokens:
            self.tokens -= 1
        return 1

    def _use_prefill_tokens(self, num_tokens: int) -> None:
        self.tokens -= num_tokens
        self.prefill_tokens = max(self.prefill_tokens - num_tokens, 0)

    def _grant_admission(self, request: Waiting, num_tokens: int) -> int:
        granted = min(num_tokens, request.num_tokens - request.num_cached_tokens, self.tokens)
        if granted <= 0 or self.rows == 0:
            return 0
        cost = self.admission_cost(request.uid)
        if cost.pages + max(self.reserved_pages, 0) > self.pages:
            return 0
        self.rows -= 1
        self._use_prefill_tokens(granted)
        self.pages -= cost.pages
        self.reserved_pages += cost.growth
        return granted


class WaitingView(Sequence[Waiting]):
    """The waiting queue as a policy sees it: ``size`` entries, each computed when it, or a later one, is first read.

    ``entries`` yields them in order, because whether an entry has a ``same_prefix_req`` depends on the earlier entries.
    An entry that is read for the first time costs some microseconds. So a policy that reads a queue of 10,000 requests
    to its end in every step delays every step by tens of milliseconds; `minisgl.plugins.scheduler` reads less.
    """

    def __init__(self, size: int, entries: Iterator[Waiting]):
        self._size = size
        self._rest = entries
        self._entries: list[Waiting] = []

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
        if (missing := index + 1 - len(self._entries)) > 0:
            self._entries.extend(islice(self._rest, missing))
        return self._entries[index]

    def __iter__(self) -> Iterator[Waiting]:
        yield from self._entries
        for i in range(len(self._entries), self._size):
            yield self[i]
