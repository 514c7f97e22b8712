"""The share of one client process: what it sends and what it returns. Request bodies are built ahead of time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from numpy.typing import NDArray

from minisgl.bench.loadgen.completion import RequestRecord, Template
from minisgl.bench.loadgen.http import ServerAddress
from minisgl.bench.loadgen.prompts import PromptFactory, Workload
from minisgl.bench.loadgen.traces import TraceRequest

AHEAD_BYTES = 64 * 2**20
"""Size of the request bodies that a process builds ahead of time, at most."""
AHEAD_BODIES = 1024
"""Number of request bodies that a process builds ahead of time, at most."""


@dataclass(frozen=True)
class Plan:
    """The share of one client process. It sends the requests ``first``, ``first + step``, … below ``total``.

    - ``due``: seconds from the start at which each of its requests is sent; None in a closed loop of ``clients``.
    - ``total``: None if only ``duration`` ends the closed loop.
    """

    address: ServerAddress
    template: Template
    workload: Workload
    prompts: PromptFactory
    first: int
    step: int
    total: int | None
    due: NDArray[np.float64] | None
    clients: int
    duration: float | None
    warmup: int
    timeout: float
    keep_text: bool = False

    def indices(self) -> Iterator[int]:
        """Yield the indices of the requests of this process."""
        return count(self.first, self.step) if self.total is None else iter(range(self.first, self.total, self.step))


@dataclass
class WorkerResult:
    """What one client process measured. ``lags`` are seconds by which its event loop woke up late."""

    records: list[RequestRecord] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0


class BodyQueue:
    """The bodies of the next requests, built ahead so that building takes no time when a request is due."""

    def __init__(self, plan: Plan):
        self._plan, self._indices = plan, plan.indices()
        self._ahead: deque[tuple[int, TraceRequest, bytes]] = deque()
        self._bytes = 0
        while self._has_room and self._build():
            pass

    @property
    def _has_room(self) -> bool:
        return self._bytes < AHEAD_BYTES and len(self._ahead) < AHEAD_BODIES

    def _build(self) -> bool:
        """Build the body of the next request. Return whether there was one."""
        index = next(self._indices, None)
        if index is None:
            return False
        plan, request = self._plan, self._plan.workload.request(index)
        body = plan.template.body(index, plan.prompts.build(index, request), request.output_len)
        self._ahead.append((index, request, body))
        self._bytes += len(body)
        return True

    def take(self) -> tuple[int, TraceRequest, bytes] | None:
        """Return the next request and its body, or None after the last."""
        if not self._ahead and not self._build():
            return None
        entry = self._ahead.popleft()
        self._bytes -= len(entry[2])
        return entry

    def refill(self) -> None:
        """Build one more body, if there is room."""
        if self._has_room:
            self._build()
