"""`routing=least_loaded`: each request goes to the replica with the fewest open requests, whatever the caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.cluster.routing import Replica, live_replicas
from minisgl.hooks import hookimpl


@dataclass
class LeastLoaded:
    """Each request goes to the living replica with the fewest open requests."""

    def build(self) -> LeastLoadedPolicy:
        return LeastLoadedPolicy()


class LeastLoadedPolicy:
    """Chooses the fewest open requests, then the fewest open prompt tokens, then the next replica in turn.

    The turn matters at low load: without it, a replica with a low index gets every request that finds all idle.
    """

    def __init__(self) -> None:
        self._last = -1

    def choose(self, block_hashes: Sequence[int], prompt_tokens: int, replicas: Sequence[Replica]) -> int:
        def order(index: int) -> tuple[int, int, bool, int]:
            replica = replicas[index]
            return replica.requests, replica.prompt_tokens, index <= self._last, index

        self._last = min(live_replicas(replicas), key=order)
        return self._last


@hookimpl
def minisgl_configs() -> Any:
    yield "routing", "least_loaded", LeastLoaded
