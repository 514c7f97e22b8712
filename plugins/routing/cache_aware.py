"""`routing=cache_aware`: each request goes to the replica that has most of its prompt cached, within a load bound.

The cost of a replica is the number of prompt tokens that it would have to compute, times ``hit_weight``, and the number
of prompt tokens that wait there. The policy chooses the lowest cost; of equal ones, the lowest load. The weight is
above 1 because a prefix that is computed on a second replica costs twice: now the computation, and later the prefix
whose pages it takes.

Costs alone would send every request with a popular prefix to one replica. So there is a load bound, as in consistent
hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018). Two counters of each replica measure its load:
requests, and prompt tokens. Both decay, so that they count about the last ``window`` requests a replica. A replica with
a counter above ``max_load`` times the mean of the living replicas gets no request. If all are above in one of the
counters, the one with the smallest excess gets it.
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

    hit_weight: float = 8.0
    """How many prompt tokens may wait at a replica for each token that it has cached and another one has not."""
    max_load: float = 1.25
    """Largest load of a replica that gets requests, relative to the mean of the living replicas: at least 1."""
    window: int = 64
    """Number of past requests, for each replica, over which the load is measured."""

    def build(self) -> CacheAwarePolicy:
        return CacheAwarePolicy(self.hit_weight, self.max_load, self.window)


class CacheAwarePolicy:
    """Chooses by the tokens to compute, among the replicas whose load is within the bound."""

    def __init__(self, hit_weight: float, max_load: float, window: int):
        if not (hit_weight >= 0.0 and math.isfinite(hit_weight)):
            raise ValueError(f"hit_weight={hit_weight}: hit_weight must be a number of at least 0")
        if not (max_load >= 1.0 and math.isfinite(max_load)):
            raise ValueError(f"max_load={max_load}: max_load must be a number of at least 1")
        if window < 1:
            raise ValueError(f"window={window}: window must be at least 1")
        self.hit_weight, self.max_load, self.window = hit_weight, max_load, window
        self._loads: dict[int, tuple[float, float]] = {}  # living replica → its requests and prompt tokens, decayed

    def choose(self, block_hashes: Sequence[int], prompt_tokens: int, replicas: Sequence[Replica]) -> int:
        self._follow(live_replicas(replicas))
        loads = self.relative_loads()
        allowed = [index for index, load in loads.items() if load <= self.max_load]

        def cost(index: int) -> tuple[float, float, int]:
            replica = replicas[index]
            new_tokens = replica.new_tokens(block_hashes, prompt_tokens)
            return self.hit_weight * new_tokens + replica.waiting_tokens, loads[index], index

        chosen = min(allowed, key=cost) if allowed else min(loads, key=loads.__getitem__)
        self._add(chosen, prompt_tokens)
        return chosen

    def relative_loads(self) -> dict[int, float]:
        """Return, for each living replica, the larger one of its counters, each divided by its mean."""
        requests, tokens = self._means()
        if requests == 0.0:
            return dict.fromkeys(self._loads, 0.0)
        return {index: max(load[0] / requests, load[1] / tokens) for index, load in self._loads.items()}

    def _means(self) -> tuple[float, float]:
        count = max(len(self._loads), 1)
        return sum(load[0] for load in self._loads.values()) / count, sum(t for _, t in self._loads.values()) / count

    def _follow(self, live: Sequence[int]) -> None:
        """Forget dead replicas. A new one begins with the mean load, or it would get all requests for a while."""
        self._loads = {index: self._loads[index] for index in live if index in self._loads}
        mean = self._means()
        for index in live:
            self._loads.setdefault(index, mean)

    def _add(self, chosen: int, prompt_tokens: int) -> None:
        decay = math.exp(-1.0 / (self.window * len(self._loads)))
        self._loads = {index: (load[0] * decay, load[1] * decay) for index, load in self._loads.items()}
        requests, tokens = self._loads[chosen]
        self._loads[chosen] = (requests + 1.0, tokens + max(prompt_tokens, 1))


@hookimpl
def minisgl_configs() -> Any:
    yield "routing", "cache_aware", CacheAware
