"""`routing=cache_aware`: each request goes to the replica that has most of its prompt cached, within a load bound.

Two counters of each replica measure its load: requests and prompt tokens that it was given. Both decay, so that they
count about the last ``window`` requests a replica. A replica whose counter is above ``max_load`` times the mean of all
living replicas gets no request. Among the others, the policy chooses the one with the fewest prompt tokens to compute,
those that wait there included; of equal ones, the least loaded.

The bound is that of consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018). The least loaded
replica is never above it, so a choice exists. At any time, a counter exceeds ``max_load`` times the mean by one request
at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.cluster.routing import Replica, live_replicas
from minisgl.hooks import hookimpl


@dataclass
class CacheAware:
    """Each request goes to the living replica with most of its prompt cached, unless that one has too much load."""

    max_load: float = 1.25
    """Largest load of a replica relative to the mean of the living replicas. It is at least 1. Low values lose
    prefix hits, high values let some replicas queue while others idle."""
    window: int = 64
    """Number of past requests, for each replica, over which the load is measured."""


class CacheAwarePolicy:
    """Chooses by the tokens to compute, among the replicas whose load is within the bound."""

    def __init__(self, max_load: float, window: int):
        if not (max_load >= 1.0 and math.isfinite(max_load)):
            raise ValueError(f"max_load={max_load}: max_load must be a number of at least 1")
        if window < 1:
            raise ValueError(f"window={window}: window must be at least 1")
        self.max_load, self.window = max_load, window
        self.loads: dict[int, list[float]] = {}
        """Index of a living replica → its requests and prompt tokens, with decay."""

    def choose(self, block_hashes: Sequence[int], prompt_tokens: int, replicas: Sequence[Replica]) -> int:
        live = live_replicas(replicas)
        self._follow(live)
        allowed = [index for index in live if self._relative_load(index) <= self.max_load]

        def cost(index: int) -> tuple[float, ...]:
            replica = replicas[index]
            new_tokens = replica.new_tokens(block_hashes, prompt_tokens)
            return new_tokens + replica.waiting_tokens, self._relative_load(index), replica.requests, index

        chosen = min(allowed or live, key=cost if allowed else self._relative_load)
        self._add(chosen, prompt_tokens)
        return chosen

    def _follow(self, live: Sequence[int]) -> None:
        """Forget dead replicas. A new one begins with the mean load, so that not every request goes there."""
        self.loads = {index: self.loads[index] for index in live if index in self.loads}
        mean = self._mean()
        for index in live:
            self.loads.setdefault(index, list(mean))

    def _mean(self) -> list[float]:
        counters = list(zip(*self.loads.values(), strict=True))
        return [sum(counter) / len(counter) for counter in counters] if counters else [0.0, 0.0]

    def _relative_load(self, index: int) -> float:
        """Return the larger one of the replica's counters, each divided by its mean."""
        return max(
            (load / mean if mean else 0.0 for load, mean in zip(self.loads[index], self._mean(), strict=True)),
            default=0.0,
        )

    def _add(self, chosen: int, prompt_tokens: int) -> None:
        decay = math.exp(-1.0 / (self.window * len(self.loads)))
        for load in self.loads.values():
            load[0] *= decay
            load[1] *= decay
        self.loads[chosen][0] += 1.0
        self.loads[chosen][1] += prompt_tokens


@hookimpl
def minisgl_configs() -> Any:
    yield "routing", "cache_aware", CacheAware


@hookimpl
def minisgl_routing(config: Any) -> CacheAwarePolicy | None:
    return CacheAwarePolicy(config.max_load, config.window) if isinstance(config, CacheAware) else None
