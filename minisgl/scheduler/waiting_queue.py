"""Requests before they run: the check of a new request (promise 2), and the queue of the waiting ones."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from operator import attrgetter

import numpy as np

from minisgl.core import I32, EngineSpec, InvalidRequestError, Req, SamplingParams

# ---- the check of a new request ------------------------------------------------------------------------

_MAX_UID = 2**31 - 1  # uids are stored as int32; negative numbers mark pages without a request


def check_request(
    spec: EngineSpec, uid: int, prompt_ids: Sequence[int] | I32, params: SamplingParams, uses_priority: bool = True
) -> I32:
    """Return the prompt as a read-only array, int32 ``[tokens]``. Such an array is returned itself: requests share it.

    Raise ValueError if ``uid`` is not a valid number of a request. Raise `InvalidRequestError`, which names the field,
    if an engine of the sizes ``spec`` can never serve the request, or if it has a priority that the scheduling policy
    does not use. The arguments may have any type. Sizes are checked before values, so the cost is bounded by the
    longest request that can be served.
    """
    if not isinstance(uid, int) or isinstance(uid, bool) or not 0 <= uid <= _MAX_UID:
        raise ValueError(f"a uid must be an integer from 0 to {_MAX_UID}")
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError("params", f"params must be SamplingParams, not {type(params).__name__}.")
    params.check(spec.vocab_size)
    _check_type(prompt_ids)
    spec.check_length(len(prompt_ids), params.max_tokens)
    ids = _check_tokens(prompt_ids, spec.vocab_size)
    if params.priority and not uses_priority:
        raise InvalidRequestError(
            "priority", f"priority must be 0, got {params.priority}: the scheduling policy does not use priorities."
        )
    return ids


def seed_of(params: SamplingParams, seed: int, arrival: int) -> int:
    """Return the seed in ``params``, or one derived from the scheduler's seed and the arrival number (splitmix64)."""
    if params.seed is not None:
        return params.seed
    x = (seed * 0x9E3779B97F4A7C15 + (arrival + 1) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (x ^ (x >> 31)) >> 1


def _check_type(prompt_ids: Sequence[int] | I32) -> None:
    is_array = isinstance(prompt_ids, np.ndarray) and prompt_ids.ndim > 0
    if not is_array and (not isinstance(prompt_ids, Sequence) or isinstance(prompt_ids, str | bytes | bytearray)):
        kind = type(prompt_ids).__name__
        raise InvalidRequestError("prompt", f"The prompt must be a sequence of token ids, not of type {kind}.")


def _check_tokens(prompt_ids: Sequence[int] | I32, vocab_size: int) -> I32:
    if not isinstance(prompt_ids, np.ndarray):
        kinds = {*map(type, prompt_ids)}
        if not all(issubclass(kind, int | np.integer) and kind is not bool for kind in kinds):
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise InvalidRequestError(
                "prompt", f"The prompt must be a list of integers; it has elements of type {names}."
            )
    ids = np.asarray(prompt_ids)
    is_integer = ids.dtype.kind in "iu"
    if isinstance(prompt_ids, np.ndarray) and (ids.ndim != 1 or not is_integer):
        what = f"an array of {ids.dtype} with {ids.ndim} dimensions"
        raise InvalidRequestError("prompt", f"The prompt must be a one-dimensional array of integers; it is {what}.")
    if not is_integer:  # numpy has no integer type for Python integers of more than 64 bits
        raise InvalidRequestError("prompt", f"A token id exceeds 64 bits; the vocabulary has {vocab_size} tokens.")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        invalid = int(ids[(ids < 0) | (ids >= vocab_size)][0])
        raise InvalidRequestError(
            "prompt", f"Token id {invalid} is not in the vocabulary, which has {vocab_size} tokens."
        )
    if ids.dtype == np.int32 and not ids.flags.writeable:
        return ids
    ids = ids.astype(np.int32)
    ids.flags.writeable = False
    return ids


# ---- the order of waiting requests ---------------------------------------------------------------------

NO_GROUP = 0
"""The group of a request that belongs to no group."""

_urgency = attrgetter("urgency")


class WaitingQueue:
    """The waiting requests, sorted by ``Req.urgency``: by priority, and then by arrival.

    Without priorities, that is the order of arrival. A retracted request returns to the place of its first arrival.

    The queue is a sorted list, and a request is found by binary search. Adding or removing a request moves the list's
    later entries, which takes some microseconds in a queue of 10,000 requests.
    """

    def __init__(self) -> None:
        self._reqs: list[Req] = []

    def add(self, req: Req) -> None:
        """Add a request, at the place of its priority and its arrival number."""
        insort(self._reqs, req, key=_urgency)

    def remove(self, req: Req) -> None:
        """Remove a request. Raise KeyError if it is not in the queue."""
        if req not in self:
            raise KeyError(req.uid)
        del self._reqs[bisect_left(self._reqs, req.urgency, key=_urgency)]

    def clear(self) -> None:
        """Remove all requests."""
        for req in list(self):
            self.remove(req)

    def first(self) -> Req | None:
        """Return the first request of the queue; None if it is empty. `FairQueue`: the one that arrived first."""
        return self._reqs[0] if self._reqs else None

    def __len__(self) -> int:
        return len(self._reqs)

    def __contains__(self, req: Req) -> bool:
        i = bisect_left(self._reqs, req.urgency, key=_urgency)
        return i < len(self._reqs) and self._reqs[i].arrival == req.arrival

    def __iter__(self) -> Iterator[Req]:
        """Yield the requests in order of urgency. The queue must not change meanwhile."""
        return iter(self._reqs)
