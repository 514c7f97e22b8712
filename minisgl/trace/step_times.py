"""A model of how long steps take, fitted to a recorded run, for `minisgl.trace.what_if`.

A step takes a fixed time, a second one if it computes prompt tokens, a time for each of these, and a time for each row.
The fit has the smallest sum of absolute errors, as a median has, so a few slow steps of a busy machine hardly change
it. No part is negative, and cached tokens are in no part: they can't make a step slower.

On a CUDA device, a step is computed after its launch, while the host goes on. On a CPU it is computed within its
launch: there, overlap hides nothing. If the record does not name its device, two launches in a row say which of both it
was: the second one waits for the first step, or it does not.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from minisgl.core import Step
from minisgl.trace import events as ev
from minisgl.trace.read import Trace

__all__ = ["StepTimes", "fit"]

F64 = NDArray[np.float64]
ITERATIONS = 30


@dataclass(frozen=True)
class StepTimes:
    """Seconds: of each step, for each prompt token and each row, of each step with prompt tokens, and of the host.

    ``host`` is its time between two steps.

    ``synchronous``: a step is computed within its launch, as on a CPU.
    """

    fixed: float
    per_prompt_token: float
    per_row: float
    prefill: float
    host: float
    synchronous: bool

    def of(self, step: Step) -> float:
        """Return the seconds that the engine takes for a step."""
        prompt = int(step.num_scheduled_tokens[step.num_continuing :].sum())
        fixed = self.fixed + (self.prefill if prompt else 0.0)
        return fixed + self.per_prompt_token * prompt + self.per_row * step.rows

    def __str__(self) -> str:
        return (
            f"a step takes {1000 * self.fixed:.2g} ms, {1000 * self.prefill:.2g} ms more if it has prompt tokens, "
            f"{1000 * self.per_prompt_token:.2g} ms for each of these and {1000 * self.per_row:.2g} ms for each row; "
            f"the host takes {1000 * self.host:.2g} ms between steps"
        )


def fit(trace: Trace, held: Collection[int] = ()) -> StepTimes:
    """Fit the model to a record. ``held`` are the steps before whose launch the server waited on purpose."""
    timed = [event for event in trace if isinstance(event, ev.Batch | ev.Done)]
    batches = {event.step: event for event in timed if isinstance(event, ev.Batch)}
    host = _median([
        after.t - before.t
        for before, after in pairwise(timed)
        if isinstance(before, ev.Done) and isinstance(after, ev.Batch) and after.step - before.step <= 2
    ])  # fmt: skip
    device = trace.header.options.get("device")
    synchronous = device == "cpu" or (device != "cuda" and _second_launch_waits(timed, host))
    seconds = _within_launches(timed, host) if synchronous else _after_launches(timed, held)
    fixed, per_prompt_token, per_row, prefill = _fit(batches, seconds).tolist()
    return StepTimes(fixed, per_prompt_token, per_row, prefill, host, synchronous)


def _second_launch_waits(timed: list[ev.Batch | ev.Done], host: float) -> bool:
    """Return whether the first of two launches in a row takes a good part of the time until its step's result."""
    read = {event.step: event.t for event in timed if isinstance(event, ev.Done)}
    shares = [
        (second.t - first.t - host) / max(read[first.step] - first.t, 1e-9)
        for first, second in pairwise(timed)
        if isinstance(first, ev.Batch) and isinstance(second, ev.Batch) and first.step in read
    ]
    return bool(shares) and float(np.median(shares)) > 0.25


def _within_launches(timed: list[ev.Batch | ev.Done], host: float) -> dict[int, float]:
    """Return the seconds from each launch to what the host did next."""
    found = {}
    for event, after in pairwise(timed):
        if isinstance(event, ev.Batch):
            found[event.step] = max(after.t - event.t - (host if isinstance(after, ev.Batch) else 0.0), 0.0)
    return found


def _after_launches(timed: list[ev.Batch | ev.Done], held: Collection[int]) -> dict[int, float]:
    """Return the seconds in which the device computed each step, as far as no wait of the host hides them."""
    found, launched, last = dict[int, float](), dict[int, float](), 0.0
    hidden = {step - 1 for step in held}  # the device computed these during the wait
    for event in timed:
        if isinstance(event, ev.Batch):
            launched[event.step] = event.t
        elif event.step in launched:
            found[event.step] = max(event.t - max(launched[event.step], last), 0.0)
            last = event.t
    seen = {step: seconds for step, seconds in found.items() if step not in hidden}
    return seen or found


def _fit(batches: dict[int, ev.Batch], seconds: dict[int, float]) -> F64:
    """Return the seconds of each step, for each prompt token and row, and of a step with prompt tokens: all ≥ 0."""
    if not seconds:
        return np.zeros(4)
    rows = np.array([_features(batches[step]) for step in seconds])
    times = np.array(list(seconds.values()))
    near = max(1e-3 * float(np.median(times)), 1e-9)
    weights, best = np.ones(len(times)), np.zeros(4)
    for _ in range(ITERATIONS):  # least squares, in which far points count less and less: the smallest absolute errors
        best = _least_squares(rows, times, weights)
        weights = 1.0 / np.maximum(np.abs(rows @ best - times), near)
    return best


def _least_squares(rows: F64, times: F64, weights: F64) -> F64:
    """Return the weights of the features that are not negative and have the smallest weighted squared error."""
    root = np.sqrt(weights)
    a, b = rows * root[:, None], times * root
    best, error = np.zeros(4), float(b @ b)
    for count in (1, 2, 3, 4):  # of equally good fits, the one with fewer parts, and with the earlier ones
        for chosen in combinations(range(4), count):
            found = np.zeros(4)
            found[list(chosen)] = np.linalg.lstsq(a[:, chosen], b, rcond=None)[0]
            left = float(((a @ found - b) ** 2).sum())
            if (found >= 0.0).all() and left < error * (1.0 - 1e-12):
                best, error = found, left
    return best


def _features(batch: ev.Batch) -> tuple[float, float, float, float]:
    prompt = batch.num_prompt_tokens
    return 1.0, float(prompt), float(len(batch.uids)), float(prompt > 0)


def _median(values: list[float]) -> float:
    return max(float(np.median(values)), 0.0) if values else 0.0
