"""The conformance kits, judged: the built-in plugins pass, and each kit finds what is wrong with a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.attention import AttentionBackend, LayerSpec
from minisgl.core import I32
from minisgl.kvcache import InsertResult, Key, MatchResult, PrefixCache
from minisgl.plugins.attention.paged import PagedAttention
from minisgl.plugins.attention.torch import Torch, TorchAttention
from minisgl.plugins.cache.naive import NaiveCache
from minisgl.plugins.cache.radix import Handle, Node, RadixCache
from minisgl.scheduler.base import Budget, Plan, Running, SchedulerPolicy, Waiting
from minisgl.testing.attention import AttentionConformance
from minisgl.testing.cache import CacheConformance
from minisgl.testing.drive import make_plugin
from minisgl.testing.policy import PolicyConformance

CPU = torch.device("cpu")


class TestTorchAttention(AttentionConformance):
    def make(self) -> AttentionBackend:
        return TorchAttention(Torch(), CPU)


class TestRadixCache(CacheConformance):
    def make(self, page_size: int) -> PrefixCache:
        return RadixCache(page_size)


class TestNaiveCache(CacheConformance):
    def make(self, page_size: int) -> PrefixCache:
        return NaiveCache()


class TestStatic(PolicyConformance):
    def make(self) -> SchedulerPolicy:
        policy: SchedulerPolicy = make_plugin("scheduler", "static")
        return policy


class TestMixedLongestPrefixFirst(PolicyConformance):
    def make(self) -> SchedulerPolicy:
        policy: SchedulerPolicy = make_plugin("scheduler", "mixed", order="lpm")
        return policy


def failures(kit: Any) -> dict[str, str]:
    """Test → message of all that fail."""
    failed = {}
    for name in dir(kit):
        if name.startswith("test_"):
            try:
                getattr(kit, name)()
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}"
    return failed


def kit_of(base: type, make: Callable[..., Any], **fields: Any) -> Any:
    return type("Wrong", (base,), {"make": lambda self, *args: make(*args), **fields})()


# ---- attention -----------------------------------------------------------------------------------------------


class TopLeft(PagedAttention):
    def seen(self, queries: int, length: int, window: int, device: torch.device) -> torch.Tensor:
        return torch.ones(queries, length, dtype=torch.bool).tril()


class NoMask(PagedAttention):
    def seen(self, queries: int, length: int, window: int, device: torch.device) -> torch.Tensor:
        return torch.ones(queries, length, dtype=torch.bool)


class WrongGroups(PagedAttention):
    def attend(self, layer: LayerSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = layer.q_heads // layer.kv_heads
        single = LayerSpec(layer.index, layer.q_heads, layer.q_heads, layer.head_dim, layer.scale, layer.window)
        return super().attend(single, q, k.repeat(1, group, 1), v.repeat(1, group, 1))


class ContiguousPages(PagedAttention):
    def places(self, pages: torch.Tensor, length: int) -> torch.Tensor:
        return pages[0].long() * self.pool.page_size + torch.arange(length)


@pytest.mark.parametrize("wrong", [TopLeft, NoMask, WrongGroups, ContiguousPages])
def test_the_attention_kit_finds_a_wrong_backend(wrong: type) -> None:
    failed = failures(kit_of(AttentionConformance, wrong))
    assert "test_it_agrees_with_dense_attention" in failed, failed


def test_the_attention_kit_says_which_query_is_wrong() -> None:
    failed = failures(kit_of(AttentionConformance, TopLeft))
    assert "query 0 of row 0 (1 positions before, 1 computed) is off by" in failed["test_the_smallest_batches"]


# ---- caches ----------------------------------------------------------------------------------------------------


class SplitLosesUsers(RadixCache):
    def _split(self, node: Node, at: int) -> Node:
        upper = super()._split(node, at)
        upper.users = 0
        return upper


class MatchesTooFar(RadixCache):
    def _common(self, a: Any, b: Any) -> int:
        return len(a) // self.page_size


class MatchIsUse(RadixCache):
    def match(self, key: Key) -> MatchResult:
        found = super().match(key)
        self.lock(found.handle)
        self.unlock(found.handle)
        return found


class ForgetsAncestors(RadixCache):
    def lock(self, handle: Handle) -> None:
        super().lock(handle)
        if handle.node.parent is not None and handle.node.parent.parent is not None:
            handle.node.parent.users -= 1


class OneNamespace(RadixCache):
    def match(self, key: Key) -> MatchResult:
        return super().match(Key(None, key.ids))

    def insert(self, base: Handle | None, key: Key, start: int, pages: I32) -> InsertResult:
        return super().insert(base, Key(None, key.ids), start, pages)


class KeepsTheCallersArray(RadixCache):
    def _grow(self, parent: Node, ids: Any, pages: I32) -> Node:
        node = super()._grow(parent, ids, pages)
        node.pages = pages
        return node


class HoldsWithoutSaying(NaiveCache):
    def insert(self, base: Any, key: Key, start: int, pages: I32) -> InsertResult:
        return InsertResult(None, np.asarray(pages, np.int32))


@pytest.mark.parametrize(
    "wrong", [SplitLosesUsers, MatchesTooFar, MatchIsUse, ForgetsAncestors, OneNamespace, KeepsTheCallersArray]
)
def test_the_cache_kit_finds_a_wrong_cache(wrong: type) -> None:
    failed = failures(kit_of(CacheConformance, wrong))
    assert "test_any_life_gives_the_same_answers_as_a_dictionary" in failed, failed


def test_the_cache_kit_finds_one_that_says_it_holds_nothing() -> None:
    assert failures(kit_of(CacheConformance, lambda size: HoldsWithoutSaying()))


def test_the_cache_kit_lets_another_order_of_eviction_pass_where_it_is_asked_to() -> None:
    class Newest(RadixCache):
        def _offer(self, node: Node) -> None:
            node.stamp = -abs(node.stamp)
            super()._offer(node)

    assert failures(kit_of(CacheConformance, Newest, lru=True))
    assert not failures(kit_of(CacheConformance, Newest, lru=False))


# ---- policies ----------------------------------------------------------------------------------------------------


class Policy:
    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        rows = [(r.uid, n) for r in running if (n := budget.grant(r, r.num_remaining_tokens or 1))]
        return Plan(rows + [(w.uid, n) for w in waiting if (n := budget.grant(w, w.num_tokens - w.num_cached_tokens))])


class Empty(Policy):
    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        return Plan([])


class Greedy(Policy):
    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        return Plan(
            [(r.uid, r.num_remaining_tokens or 1) for r in running]
            + [(w.uid, w.num_tokens - w.num_cached_tokens) for w in waiting]
        )


class Moody(Policy):
    def __init__(self) -> None:
        self.asked = 0

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        self.asked += 1
        return super().plan(waiting[: self.asked % 3], running, budget)


class Twice(Policy):
    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        plan = super().plan(waiting, running, budget)
        return Plan([*plan.rows, *plan.rows[:1]])


class NoPlan(Policy):
    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        return super().plan(waiting, running, budget).rows  # type: ignore[return-value]


def test_the_policy_kit_lets_a_plain_policy_pass() -> None:
    assert not failures(kit_of(PolicyConformance, Policy, runs=12))


@pytest.mark.parametrize("wrong", [Empty, Greedy, Moody, Twice, NoPlan])
def test_the_policy_kit_finds_a_wrong_policy(wrong: type) -> None:
    assert failures(kit_of(PolicyConformance, wrong, runs=12))
