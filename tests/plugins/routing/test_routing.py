"""The routing policies: choices computed by hand, and what holds for any requests and replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.cluster.kv_events import BlockStored
from minisgl.cluster.options import ClusterConfig
from minisgl.cluster.routing import NoReplicaError, Replica, RoutingPolicy
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import ConfigError, PluginManager
from minisgl.testing.drive import make_plugin

NAMES = ("round_robin", "least_loaded", "cache_aware")
BLOCK = 4


def stored(*hashes: int) -> BlockStored:
    return BlockStored(list(hashes), None, [0] * BLOCK * len(hashes), BLOCK, None, "GPU", None)


def replicas(count: int, cached: dict[int, Sequence[int]] | None = None) -> list[Replica]:
    """Return replicas of which some have cached blocks: index → hashes."""
    views = [Replica(BLOCK) for _ in range(count)]
    for index, hashes in (cached or {}).items():
        views[index].apply([stored(*hashes)])
    return views


def load(view: Replica, count: int, prompt_tokens: int = 8) -> None:
    """Open this many requests, which have no token yet."""
    for key in range(count):
        view.start(("load", key), [], prompt_tokens, 1)


def cache_aware(**options: Any) -> RoutingPolicy:
    policy: RoutingPolicy = make_plugin("routing", "cache_aware", **options)
    return policy


# ---- choices ---------------------------------------------------------------------------------------------


def test_round_robin_leaves_out_the_dead() -> None:
    policy, views = make_plugin("routing", "round_robin"), replicas(4)
    views[2].stop()
    assert [policy.choose([], 8, views) for _ in range(7)] == [0, 1, 3, 0, 1, 3, 0]


def test_round_robin_reaches_a_new_replica() -> None:
    policy, views = make_plugin("routing", "round_robin"), replicas(2)
    assert [policy.choose([], 8, views) for _ in range(2)] == [0, 1]
    views.append(Replica(BLOCK))
    assert [policy.choose([], 8, views) for _ in range(3)] == [2, 0, 1]


def test_least_loaded_counts_requests_then_tokens_then_turns() -> None:
    policy, views = make_plugin("routing", "least_loaded"), replicas(3)
    assert [policy.choose([], 8, views) for _ in range(4)] == [0, 1, 2, 0]  # all idle: in turn
    load(views[0], 1)
    load(views[1], 2)
    load(views[2], 2, prompt_tokens=7)
    assert policy.choose([], 8, views) == 0
    load(views[0], 2)
    assert policy.choose([], 8, views) == 2


def test_least_loaded_ignores_the_caches() -> None:
    policy, views = make_plugin("routing", "least_loaded"), replicas(2, {1: [5, 6]})
    assert policy.choose([5, 6], 9, views) == 0


def test_cache_aware_follows_the_longest_prefix() -> None:
    views = replicas(3, {1: [5], 2: [5, 6, 7]})
    assert cache_aware().choose([5, 6, 7], 13, views) == 2
    assert cache_aware().choose([5, 6, 8], 13, views) == 2
    assert cache_aware().choose([9, 6, 7], 13, views) == 0  # blocks after an unknown one are no prefix


def test_cache_aware_weighs_a_hit_with_the_queue() -> None:
    """Replica 1 has 8 tokens more than replica 0. They count as 16 waiting tokens with ``hit_weight=2``."""
    views = replicas(2, {1: [5, 6]})
    load(views[1], 1, prompt_tokens=15)
    assert cache_aware(hit_weight=2.0).choose([5, 6], 9, views) == 1
    load(views[1], 2, prompt_tokens=1)
    assert cache_aware(hit_weight=2.0).choose([5, 6], 9, views) == 0
    assert cache_aware(hit_weight=8.0).choose([5, 6], 9, views) == 1


def test_tokens_wait_until_the_first_token() -> None:
    views = replicas(2, {1: [5, 6]})
    load(views[1], 1, prompt_tokens=1000)
    assert cache_aware().choose([5, 6], 9, views) == 0
    views[1].first_token(("load", 0))
    assert cache_aware().choose([5, 6], 9, views) == 1


def test_a_prompt_under_way_counts_as_cached() -> None:
    """The second request with a prefix follows the first one, whose blocks no event has told yet."""
    policy, views = cache_aware(max_load=10.0), replicas(3)
    first = policy.choose([5, 6, 7], 13, views)
    views[first].start("a", [5, 6, 7], 13, 1)
    assert policy.choose([5, 6, 8], 13, views) == first


def test_a_replica_above_the_bound_gets_no_request() -> None:
    policy, views = cache_aware(max_load=1.5), replicas(2, {0: [5, 6]})
    # After the requests 1 to 5, replica 0 has 2, 1, 4/3, 3/2 and 6/5 of the mean, apart from the decay.
    assert [policy.choose([5, 6], 9, views) for _ in range(6)] == [0, 1, 0, 0, 1, 0]


def test_a_new_replica_does_not_get_everything() -> None:
    """A replica that comes back has the mean load, not none: its peers keep the requests that they have cached."""
    policy, views = cache_aware(), replicas(3, {0: [1], 1: [2], 2: [3]})
    for number in range(60):
        policy.choose([1 + number % 3], 5, views)
    views[0].stop()
    for number in range(20):
        assert policy.choose([2 + number % 2], 5, views) == 1 + number % 2
    views[0] = Replica(BLOCK)
    chosen = [policy.choose([2 + number % 2], 5, views) for number in range(20)]
    assert chosen.count(0) <= 4


# ---- properties ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_no_living_replica(name: str) -> None:
    views = replicas(2)
    for view in views:
        view.stop()
    with pytest.raises(NoReplicaError, match="None of the 2 replicas is alive"):
        make_plugin("routing", name).choose([], 8, views)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_living_replica_is_chosen(name: str, data: st.DataObject) -> None:
    """Whatever the view says: events of blocks that are not there, replicas that die and come back, odd lengths."""
    policy, views = make_plugin("routing", name), replicas(data.draw(st.integers(1, 5)))
    hashes = st.lists(st.integers(0, 6), max_size=4)
    for key in range(data.draw(st.integers(1, 12))):
        for view in views:
            match data.draw(st.integers(0, 7)):
                case 0:
                    view.stop()
                case 1:
                    view.alive = True
                case 2:
                    view.apply([stored(*data.draw(hashes))])
                case 3:
                    view.end(data.draw(st.integers(0, 12)))
        if not any(view.alive for view in views):
            views[0].alive = True
        prompt, tokens = data.draw(hashes), data.draw(st.integers(0, 40))
        chosen = policy.choose(prompt, tokens, views)
        assert views[chosen].alive
        views[chosen].start(key, prompt, tokens, 4)


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("hot", [1.0, 0.7])
def test_the_load_bound_holds(count: int, hot: float) -> None:
    """A share ``hot`` of the requests has one prefix. No replica is ever busy, so only the bound spreads them.

    Over the run, the replica with most requests has at most 1.3 times the mean, the same for tokens.
    """
    rng = np.random.default_rng(count)
    policy, views = cache_aware(), replicas(count, {0: [1, 2, 3, 4]})
    requests, tokens = np.zeros(count), np.zeros(count)
    for number in range(150 * count):
        prompt = [1, 2, 3, 4] if rng.random() < hot else [100 + number]
        length = len(prompt) * BLOCK + int(rng.integers(1, 200))
        chosen = policy.choose(prompt, length, views)
        requests[chosen] += 1
        tokens[chosen] += length
    assert requests.max() / requests.mean() <= 1.3
    assert tokens.max() / tokens.mean() <= 1.3
    assert requests[0] == requests.max()


def test_wrong_options_are_refused() -> None:
    manager = PluginManager.load(light=True)
    for word in ("max_load=0.9", "max_load=inf", "window=0", "hit_weight=-1"):
        config = compose(manager, [f"routing.{word}"], ClusterConfig)
        with pytest.raises(ConfigError, match=word.partition("=")[0]):
            manager.build("routing", config.routing)


# ---- the view --------------------------------------------------------------------------------------------


def test_the_view_of_the_open_requests() -> None:
    view = Replica(BLOCK)
    view.start("a", [1, 2], 10, 5)
    view.start("b", [1, 2, 3], 13, 7)
    assert (view.requests, view.prompt_tokens, view.output_tokens) == (2, 23, 12)
    assert view.waiting_tokens == 10 + (13 - 8)  # two blocks of b are those of a
    view.first_token("a")
    view.first_token("a")
    assert view.waiting_tokens == 5
    view.end("a")
    assert view.cached_blocks([1, 2, 3, 4]) == 3
    view.end("b")
    view.end("b")
    assert (view.requests, view.prompt_tokens, view.output_tokens, view.waiting_tokens) == (0, 0, 0, 0)
    assert view.cached_blocks([1, 2, 3, 4]) == 0


def test_a_whole_cached_prompt_still_has_a_token_to_compute() -> None:
    view = replicas(1, {0: [1, 2]})[0]
    assert view.new_tokens([1, 2], 8) == 1


def test_a_dead_replica_has_nothing() -> None:
    view = replicas(1, {0: [1, 2]})[0]
    view.start("a", [1], 5, 5)
    view.stop()
    assert (view.alive, view.requests, view.cached_blocks([1])) == (False, 0, 0)
    view.end("a")
    assert view.prompt_tokens == 0
