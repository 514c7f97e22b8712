"""What a scheduler does for requests with a constraint: they wait until it is ready, sample late, and obey its masks.

The scheduler gets a `ConstraintManager` with its first such request, and asks it at three places: docs/design/
several-positions.md, "late masks".
"""

from __future__ import annotations

import numpy as np

from minisgl.core import I32, Bools, Output, Req, StepResult, TokenMasks
from minisgl.scheduler.steps import Ended, InFlightStep, ResultReader

WAIT = 0.01
"""Seconds that a turn without other work waits for a constraint."""


class ConstraintManager:
    """The constrained requests of one scheduler: those that are not ready yet, and the masks of steps in flight."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.preparing: list[Req] = []  # requests whose constraint is not ready, in order of arrival
        self.dead_ends: dict[int, dict[int, int]] = {}  # step → its dead ends: see `token_masks`

    def add(self, req: Req) -> None:
        """Add a new request. It is prepared until its constraint is ready: a thread may compile its grammar."""
        self.preparing.append(req)

    def pop_ready(self, is_idle: bool) -> list[Req]:
        """Remove and return the requests whose constraint is ready. If ``is_idle``, wait for the first one a moment."""
        open_reqs = [req for req in self.preparing if req.finish_reason is None]
        seconds, ready, self.preparing = WAIT if is_idle else 0.0, list[Req](), []
        for req in open_reqs:
            (ready if req.constraint.is_ready(seconds) else self.preparing).append(req)
            seconds = 0.0
        return ready

    def masks(self, launched: InFlightStep) -> tuple[TokenMasks, Ended]:
        """Return the masks of a launched step that waits for them, and the requests that may sample no token.

        The results of all earlier steps have been read.
        """
        masks, dead_ends = token_masks(launched, self.vocab_size)
        if dead_ends:
            self.dead_ends[launched.step.id] = dead_ends
        return masks, [(launched.reqs[row], "error") for row, position in dead_ends.items() if position == 0]

    def append(
        self, results: ResultReader, launched: InFlightStep, result: StepResult, out: Output
    ) -> tuple[Bools, Ended]:
        """Do what `ResultReader.append` does. The tokens of a row count up to its dead end, where its request ends.

        The constraints of the other requests advance by the tokens that count.
        """
        dead_ends = self.dead_ends.pop(launched.step.id, {})
        cut = {row: position for row, position in dead_ends.items() if 0 < position < result.accepted[row]}
        for row, position in cut.items():
            result.accepted[row] = position
        gained, ended = results.append(launched, result, out)
        done = {req.uid for req, _ in ended}
        for row in np.flatnonzero(gained).tolist():
            req = launched.reqs[row]
            if req.constraint is None or req.uid in done:
                continue
            if row in cut:
                ended.append((req, "error"))
            else:
                req.constraint.advance(req.output_ids[-int(result.accepted[row]) :])
        return gained, ended


def token_masks(launched: InFlightStep, vocab_size: int) -> tuple[TokenMasks, dict[int, int]]:
    """Return the masks of a launched step, and the dead ends of its rows.

    A row has a *dead end* if its constraint allows no token at a position: row → the first such position, from 0, among
    those that the row samples. There, the row gets no mask and samples any token, which is discarded: its request ends
    with an error, at once if this is the row's first position, and otherwise with the result, if all drafts before the
    position are accepted.
    """
    step = launched.step
    ends = np.cumsum(step.num_scheduled_tokens).tolist()
    masks: list[I32] = [np.empty((0, -(-vocab_size // 32)), np.int32)]
    places: list[tuple[int, int, int]] = []  # of each mask: the row, and its position in the row and in the step
    first = 0
    for row, (req, n) in enumerate(zip(launched.reqs, step.num_sampled_tokens.tolist(), strict=True)):
        if n and req.constraint is not None:  # the request has not ended meanwhile
            masks.append(req.constraint.masks(step.input_ids[ends[row] - n + 1 : ends[row]].tolist()))
            places += [(row, k, first + k) for k in range(n)]
        first += n
    bits, dead_ends = np.concatenate(masks), dict[int, int]()
    for index in np.flatnonzero(~bits.any(axis=1)).tolist():
        row, position, _ = places[index]
        dead_ends.setdefault(row, position)
    if dead_ends:
        kept = [i for i, (row, position, _) in enumerate(places) if position < dead_ends.get(row, position + 1)]
        bits, places = bits[kept], [places[i] for i in kept]
    return TokenMasks(np.array([place[2] for place in places], np.int32), bits), dead_ends
