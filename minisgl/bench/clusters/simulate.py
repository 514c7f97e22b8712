"""Plays requests to simulated replicas, behind a routing policy whose view is the replicas' KV events."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from minisgl.bench.clusters.requests import Request
from minisgl.bench.clusters.results import Served
from minisgl.cluster.routing import Replica, RoutingPolicy
from minisgl.config import Config
from minisgl.core import EngineSpec
from minisgl.plugin_manager.manager import PluginManager
from minisgl.testing.replica import SimReplica, StepCost

H200_14B = StepCost(step=7.2e-3, prompt_token=39.3e-6, prompt_context=2.85e-9, decode_row=14e-6, decode_context=41e-9)
"""Qwen3-14B in bfloat16 on one H200, from the numbers in docs/benchmarks/h200.md.

- ``step``: one request decodes at 138 tokens per second.
- ``prompt_token``: 24,000 prompt tokens per second in steps of 8,192 tokens, without the other terms.
- ``prompt_context``: attention is 3.5 % of this time for prompts of 1,024 tokens. Long prompts have not been measured.
- ``decode_context``: 163,840 bytes of keys and values at 4.0 TB/s.
- ``decode_row``: the rest of *64 requests*, whose decode steps take 11.2 ms with 64 rows of 1,150 tokens.
"""
H200_14B_POOL = 600_000
"""Tokens of the KV pool of such a server, rounded down.

``memory_ratio=0.9`` of 139 GiB are 125 GiB; the weights take 27.5 GiB, workspaces 2 GiB, and a token 160 KiB: 40
layers, 8 heads of 128 numbers for keys and as many for values, 2 bytes each.
"""
MAX_VOCAB = 2**31 - 1


def build_replicas(
    manager: PluginManager,
    config: Config,
    count: int,
    block_size: int,
    pool_tokens: int,
    max_tokens: int,
    whole: bool = False,
) -> list[SimReplica]:
    """Return ``count`` replicas with a pool of ``pool_tokens`` tokens each, in pages of ``block_size`` tokens.

    ``max_tokens`` is the largest number of tokens of a request. ``whole``: one server instead, with the pools of all
    of them, as many rows in total, and steps as much faster.
    """
    factor = count if whole else 1
    pages = pool_tokens // block_size * factor
    spec = EngineSpec(block_size, pages, config.max_running_requests * factor, max_tokens, MAX_VOCAB)
    return [
        SimReplica(
            spec,
            manager.build("cache", config.cache, page_size=block_size),
            manager.build("scheduler", config.scheduler),
            H200_14B.faster(factor),
            max_prefill_tokens=config.max_prefill_tokens,
        )
        for _ in range(1 if whole else count)
    ]


def simulate(
    requests: Sequence[Request],
    policy: RoutingPolicy,
    replicas: Sequence[SimReplica],
    speed: float = 1.0,
    progress: Callable[[], object] = lambda: None,
) -> list[Served]:
    """Return the outcome of each request, which arrives ``speed`` times as early as its ``arrival`` says.

    ``progress`` is called for each request that arrives.
    """
    views = [Replica(requests[0].block_size) for _ in replicas]
    chosen: list[int] = []
    ttfts: dict[int, float] = {}
    served: dict[int, Served] = {}

    def learn(until: float) -> None:
        for view, replica in zip(views, replicas, strict=True):
            replica.advance(until)
            for notice in replica.learned(until):
                view.apply(notice.events)
                for uid in notice.first_tokens:
                    view.first_token(uid)
                    ttfts[uid] = notice.time - requests[uid].arrival / speed
                for end in notice.finished:
                    view.end(end.uid)
                    tokens = end.prompt_tokens, end.cached_tokens, end.output_tokens
                    served[end.uid] = Served(chosen[end.uid], ttfts[end.uid], *tokens)

    for uid, request in enumerate(requests):
        now = request.arrival / speed
        learn(now)
        index = policy.choose(request.hashes, request.prompt_tokens, views)
        chosen.append(index)
        views[index].start(uid, request.hashes, request.prompt_tokens, request.output_tokens)
        replicas[index].add(uid, request.prompt_ids(), request.output_tokens, now)
        progress()
    learn(math.inf)
    return [served[uid] for uid in range(len(requests))]
