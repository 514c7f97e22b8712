"""An engine that computes nothing and checks nothing, to measure the time that the scheduler needs for a step."""

from __future__ import annotations

from collections import deque

import numpy as np

from minisgl.core import I32, EngineSpec, Step, StepResult, TokenMasks

__all__ = ["NullEngine"]


class NullEngine:
    """An engine that samples the token ``token`` for every row, rejects drafts, and whose results are ready at once."""

    eos_ids: frozenset[int] = frozenset()

    def __init__(self, spec: EngineSpec, token: int = 1):
        self.spec = spec
        self.last: Step | None = None
        self._tokens: I32 = np.full((spec.max_running_requests, 1), token, np.int32)
        self._unread: deque[Step] = deque()

    def launch(self, step: Step) -> None:
        """Store the step in ``last`` and queue its result."""
        self.last = step
        self._unread.append(step)

    def sample(self, masks: TokenMasks) -> None:
        """Do nothing: the results do not depend on masks."""

    def result(self) -> StepResult:
        """Return the result of the oldest unread step; tokens [rows, 1]."""
        step = self._unread.popleft()
        return StepResult(step.id, self._tokens[: step.rows], step.sample.astype(np.int32))

    def close(self) -> None:
        """Do nothing: the engine holds no resources."""
