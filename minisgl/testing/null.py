"""An engine that computes nothing and checks nothing, so that what is left of a step's time is the scheduler's."""

from __future__ import annotations

from collections import deque

import numpy as np

from minisgl.core import I32, EngineSpec, Step, StepResult

__all__ = ["NullEngine"]


class NullEngine:
    """Every sampled token is ``token``; results are ready at once."""

    eos_ids: frozenset[int] = frozenset()

    def __init__(self, spec: EngineSpec, token: int = 1):
        self.spec = spec
        self.last: Step | None = None
        self._tokens: I32 = np.full((spec.max_running_requests, 1), token, np.int32)
        self._unread: deque[Step] = deque()

    def launch(self, step: Step) -> None:
        """Remember the step."""
        self.last = step
        self._unread.append(step)

    def result(self) -> StepResult:
        """The oldest unread step's; tokens [rows, 1]."""
        step = self._unread.popleft()
        return StepResult(step.id, self._tokens[: step.rows], step.sample.astype(np.int32))

    def close(self) -> None:
        """Nothing to close."""
