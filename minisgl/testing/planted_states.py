"""Bugs of recurrent states, as patches of the scheduler, each with a small workload that reveals the bug: `planted`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from minisgl.core import EngineSpec
from minisgl.scheduler.cache_manager import CacheManager
from minisgl.testing.drive import Drive, Job, make_plugin
from minisgl.testing.planted import ABORTED, ArrivalOrderPolicy, job, pool_rows_freed_in_flight

__all__ = ["PLANTED_STATES", "PlantedState"]

Bug = AbstractContextManager[Any]


@dataclass(frozen=True)
class PlantedState:
    """A bug, and a workload that reveals it: the fields are those of `minisgl.testing.planted.Planted`."""

    plant: Callable[[], Bug]
    clients: Sequence[Job]
    rule: str = "state"
    num_pages: int = 30
    max_running_requests: int = 4
    drafts: tuple[int, int, int] | None = None

    def run(self) -> Drive:
        """Run the workload. With the bug, raise the error that reports it."""
        spec = EngineSpec(4, self.num_pages, self.max_running_requests, 64, 50, has_states=True)
        cache = make_plugin("cache", "radix", page_size=4)
        drive = Drive(spec, cache, ArrivalOrderPolicy(), max_prefill_tokens=8, drafts=self.drafts)
        drive.run(self.clients)
        return drive


def hit_without_state() -> Bug:
    """Patch the cache manager: a cached prefix is reused, although no slot has its state."""
    real = CacheManager.__init__

    def init(self: CacheManager, spec: EngineSpec, *args: Any) -> None:
        real(self, spec, *args)
        self.reuses = self.cache.reuses

    return patch.object(CacheManager, "__init__", init)


SHARED = [job(1, 20, 8), job(2, 23, 8, arrive=9), job(3, 9, 8, first=9, arrive=2)]

PLANTED_STATES: dict[str, PlantedState] = {
    "a prefix hit without a state": PlantedState(hit_without_state, SHARED),
    "a slot given back while a launched step may write it": PlantedState(
        pool_rows_freed_in_flight, ABORTED, "row-in-flight", max_running_requests=2
    ),
}
"""Description of each bug → the bug and its workload."""
