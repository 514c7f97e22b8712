"""Decides how many drafts each request gets: between the proposer, which guesses tokens, and the step builder.

A verification row costs more than a decode row, and the host must wait for its result before it can build the next
step. So the number of drafts follows, for each request, how many of its drafts were accepted; and for the whole batch,
drafts are verified only where they make it faster. Both are measured, not assumed: docs/design/speculation.md.

This module knows requests and numbers of tokens. It builds no steps and knows no pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from minisgl.core import I32, EngineSpec, Req
from minisgl.scheduler.base import DraftProposer
from minisgl.scheduler.results import InFlightStep

K = TypeVar("K")
FIRST_DRAFTS = 4
"""Drafts of a request's first verification."""
LIKELY = 0.2
"""The smallest probability at which a draft is likely enough to be accepted that it is verified."""
MAX_PAUSE = 64
"""The longest pause in steps of a request whose drafts are never accepted."""
PROBE_STEPS = 64
"""After this many steps of one kind, a step of the other kind is measured again."""
MAX_TRIES = 4
"""How often plain steps are tried whose time can't be measured, because every step has prompts too."""
_SMOOTHING = 0.1  # weight of the newest value in each average


class Speculation:
    """The drafts of one scheduler's requests.

    With ``adapt=False``, every request always gets as many drafts as it may.
    """

    def __init__(
        self,
        proposer: DraftProposer,
        spec: EngineSpec,
        max_draft_tokens: int,
        clock: Callable[[], float],
        adapt: bool = True,
    ):
        self.proposer, self.max_draft_tokens, self.clock, self.adapt = proposer, max_draft_tokens, clock, adapt
        rows = spec.max_running_requests
        self._length = np.zeros(rows, np.int32)  # drafts that the request gets next
        self._pause = np.zeros(rows, np.int32)  # length of its next pause
        self._resume = np.zeros(rows, np.int64)  # the step from which it gets drafts again
        self._rate = np.zeros(rows)  # share of its drafts that are accepted, averaged
        self._times = StepTimes()

    # ---- requests ------------------------------------------------------------------------------------------

    def admitted(self, reqs: Sequence[Req]) -> None:
        """Note requests that begin to run."""
        rows = [req.req_pool_idx for req in reqs]
        self._length[rows] = min(FIRST_DRAFTS, self.proposer.max_drafts)
        self._pause[rows], self._resume[rows], self._rate[rows] = 1, 0, 0.5
        for req in reqs:
            self.proposer.admitted(req)

    def removed(self, reqs: Sequence[Req]) -> None:
        """Note requests that stop to run, before they lose their rows."""
        for req in reqs:
            self.proposer.removed(req)

    # ---- drafts --------------------------------------------------------------------------------------------

    def propose(self, step_id: int, reqs: Sequence[Req], rows: I32, positions: I32, limits: I32) -> list[Sequence[int]]:
        """Return the drafts of each request in a step: those for ``positions[i]`` and after it, at most ``limits[i]``.

        ``rows`` are the request-pool rows.
        """
        limits = np.minimum(limits, min(self.max_draft_tokens, self.proposer.max_drafts))
        if self.adapt:
            limits = np.where(self._resume[rows] <= step_id, np.minimum(limits, self._length[rows]), 0)
        if not (limits > 0).any():
            return [()] * len(reqs)
        drafts = list(self.proposer.propose(reqs, positions.tolist(), limits.tolist()))
        if self.adapt and not self._pays(rows, np.array([len(d) for d in drafts], np.int32)):
            return [()] * len(reqs)
        return drafts

    def _pays(self, rows: I32, counts: I32) -> bool:
        """Return whether a step with ``counts[i]`` drafts in each row makes the batch faster than a step without."""
        total = int(counts.sum())
        if total == 0:
            return False
        rate = np.minimum(self._rate[rows], 0.99)
        accepted = float((rate * (1 - rate**counts) / (1 - rate)).sum())  # the sum of rate^k for k = 1 … count
        return self._times.verifying_pays(len(rows), total, 1 + accepted / len(rows))

    # ---- results -------------------------------------------------------------------------------------------

    def read(self, launched: InFlightStep, accepted: I32, gained: Sequence[int]) -> None:
        """Note the result of a step: the requests in the rows ``gained`` got ``accepted[row]`` tokens each."""
        step = launched.step
        self._times.add(step.id, step.num_decode, step.num_verify, len(step.input_ids), step.rows, self.clock())
        reqs = [launched.reqs[i] for i in gained]
        if not reqs:
            return
        runs = [req.output_ids[len(req.output_ids) - int(accepted[i]) :] for i, req in zip(gained, reqs, strict=True)]
        self.proposer.advanced(reqs, runs)
        if step.num_verify and self.adapt:
            verified = [i for i in gained if step.num_decode <= i < step.num_decode + step.num_verify]
            counts = step.num_sampled_tokens[verified] - 1
            self._adapt(step.id, step.req_pool_indices[verified], counts, accepted[verified] - 1)

    def _adapt(self, step_id: int, rows: I32, counts: I32, accepted: I32) -> None:
        """Set the next number of drafts of each row, of whose ``counts`` drafts ``accepted`` were accepted."""
        tried = np.minimum(accepted + 1, counts)  # drafts after the first wrong one say nothing
        self._rate[rows] += (1 - (1 - _SMOOTHING) ** tried) * (accepted / tried - self._rate[rows])
        # All of `likely` drafts together are accepted with a probability of at least LIKELY.
        likely = (np.log(LIKELY) / np.log(np.clip(self._rate[rows], 0.01, 0.99))).astype(np.int32)
        full = accepted == counts
        length = np.where(full, 2 * np.maximum(counts, self._length[rows]), np.maximum(accepted + 1, likely))
        self._length[rows] = np.minimum(length, self.proposer.max_drafts)
        none = (accepted == 0) & (likely == 0)
        self._resume[rows] = np.where(none, step_id + self._pause[rows], 0)
        self._pause[rows] = np.where(none, np.minimum(2 * self._pause[rows], MAX_PAUSE), 1)


class StepTimes:
    """How long steps take that compute one token a row, and steps that verify drafts, by their size.

    The time of a step is that between its result and the result before it. With overlap scheduling, this is the
    device's time if the host is faster. After a step that verifies, the host's time is part of it, since the host had
    to wait: so it counts as a cost of speculation.
    """

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}  # size class of the number of rows → seconds
        self._verifying: dict[tuple[int, int], float] = {}  # the same, and size class of the number of drafts → seconds
        self._last = (-1, 0.0, "other")  # number, time and kind of the step whose result was read last
        self._in_a_row = {"plain": 0, "verifying": 0}  # steps since the last step of the other kind
        self._plain_steps = 0  # the next steps that must be plain
        self._tries = 0  # how often such steps were asked for since the time of a plain step was known

    def add(self, step_id: int, num_decode: int, num_verify: int, num_tokens: int, rows: int, now: float) -> None:
        """Note that the result of a step was read at time ``now``. Steps with prompts are not measured."""
        kind = "other" if num_decode + num_verify < rows else "verifying" if num_verify else "plain"
        last_id, last_time, last_kind = self._last
        self._last = (step_id, now, kind)
        if kind == "other":
            return
        other = "verifying" if kind == "plain" else "plain"
        self._in_a_row[kind] += 1
        self._in_a_row[other] = 0
        if last_id != step_id - 1 or last_kind == "other":
            return
        if kind == "verifying":
            self._average(self._verifying, (_size(rows), _size(num_tokens - rows)), now - last_time)
        elif last_kind == "plain":
            self._average(self._plain, _size(rows), now - last_time)

    @staticmethod
    def _average(times: dict[K, float], key: K, seconds: float) -> None:
        times[key] = times[key] + _SMOOTHING * (seconds - times[key]) if key in times else seconds

    def verifying_pays(self, rows: int, drafts: int, tokens: float) -> bool:
        """Return whether a step of ``rows`` rows that verifies ``drafts`` drafts is worth its time.

        ``tokens`` is the number of tokens a row that it is expected to give.

        If one of the two times is not known, or is old, the answer is the step that measures it.
        """
        if self._plain_steps:
            self._plain_steps -= 1
            return False
        plain = self._plain.get(_size(rows))
        verifying = self._verifying.get((_size(rows), _size(drafts)))
        if (plain is None and self._tries < MAX_TRIES) or self._in_a_row["verifying"] >= PROBE_STEPS:
            self._plain_steps = 1  # this step and the next: only a plain step after a plain step is measured
            self._tries += 1
            self._in_a_row["verifying"] = 0
            return False
        if plain is None or verifying is None or self._in_a_row["plain"] >= PROBE_STEPS:
            return True
        self._tries = 0
        return tokens * plain > verifying


def _size(number: int) -> int:
    """Return the size class of a number: 0 for 0, 1 for 1, 2 for 2 and 3, 3 for 4 to 7, and so on."""
    return number.bit_length()
