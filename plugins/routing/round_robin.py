"""`routing=round_robin`: each request goes to the next replica in turn, whatever the load and the caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.cluster.routing import Replica, live_replicas
from minisgl.hooks import hookimpl


@dataclass
class RoundRobin:
    """Each request goes to the next living replica in turn."""

    def build(self) -> RoundRobinPolicy:
        return RoundRobinPolicy()


class RoundRobinPolicy:
    """Chooses the first living replica after the last one that was chosen."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, block_hashes: Sequence[int], prompt_tokens: int, replicas: Sequence[Replica]) -> int:
        live = live_replicas(replicas)
        self._last = next((index for index in live if index > self._last), live[0])
        return self._last


@hookimpl
def minisgl_configs() -> Any:
    yield "routing", "round_robin", RoundRobin
