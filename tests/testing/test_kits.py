"""Tests of the kits for attention, caches and policies: shipped plugins pass, and faulty plugins fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.attention import AttentionBackend, AttnNeeds, LayerSpec
from minisgl.core import I32
from minisgl.plugins.attention.paged import PagedAttention
from minisgl.plugins.attention.torch import Torch, TorchAttention
from minisgl.plugins.cache.base import InsertResult, Key, MatchResult, PrefixCache
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


class HoldsNothing:
    """A prefix cache that never holds a page."""

    reuses = False
    evictable_pages = total_pages = 0

    def match(self, key: Key) -> MatchResult:
        return MatchResult(None, np.empty(0, np.int32), 0)

    def lock(self, handle: Any) -> None:
        pass

    def unlock(self, handle: Any) -> None:
        pass

    def insert(self, base: Any, key: Key, start: int, pages: I32) -> InsertResult:
        return InsertResult(base, np.empty(0, np.int32))

    def evict(self, pages: int) -> I32:
        return np.empty(0, np.int32)

    def check(self) -> None:
        pass


class TestCacheThatHoldsNothing(CacheConformance):
    def make(self, page_size: int) -> PrefixCache:
        return HoldsNothing()


class TestStatic(PolicyConformance):
    def make(self) -> SchedulerPolicy:
        policy: SchedulerPolicy = make_plugin("scheduler", "static")
        return policy


class TestMixedLongestPrefixFirst(PolicyConformance):
    def make(self) -> SchedulerPolicy:
        policy: SchedulerPolicy = make_plugin("scheduler", "mixed", order="lpm")
        return policy


def failures(kit: Any) -> dict[str, str]:
    """Run all tests of a kit. Return the message of each failed test by the test's name."""
    failed = {}
    for name in dir(kit):
        if name.startswith("test_"):
            try:
                getattr(kit, name)()
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}"
    return failed


def kit_of(base: type, make: Callable[..., Any], **fields: Any) -> Any:
    """Build a kit object whose ``make`` is the given function, and whose attributes are ``fields``."""
    return type("Wrong", (base,), {"make": lambda self, *args: make(*args), **fields})()


# ---- attention -----------------------------------------------------------------------------------------------


class TopLeft(PagedAttention):
    """Aligns the causal mask with the first key, not the last."""

    def attention_mask(self, queries: int, length: int, window: int, device: torch.device) -> torch.Tensor:
        return torch.ones(queries, length, dtype=torch.bool).tril()


class NoMask(PagedAttention):
    """Lets every query see all keys."""

    def attention_mask(self, queries: int, length: int, window: int, device: torch.device) -> torch.Tensor:
        return torch.ones(queries, length, dtype=torch.bool)


class WrongGroups(PagedAttention):
    """Assigns query heads to the wrong KV heads."""

    def attend_row(self, layer: LayerSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = layer.q_heads // layer.kv_heads
        single = LayerSpec(layer.index, layer.q_heads, layer.q_heads, layer.head_dim, layer.scale, layer.window)
        return super().attend_row(single, q, k.repeat(1, group, 1), v.repeat(1, group, 1))


class ContiguousPages(PagedAttention):
    """Assumes that the pages of a request are consecutive in the pool."""

    def kv_locations(self, pages: torch.Tensor, length: int) -> torch.Tensor:
        return pages[0].long() * self.pool.page_size + torch.arange(length)


class NoNorm(PagedAttention):
    """Leaves out the norm of queries and keys."""

    def attend(self, layer: LayerSpec, qkv: torch.Tensor, norm: object, *given: torch.Tensor) -> torch.Tensor:
        return super().attend(layer, qkv, None, *given)


class UnrotatedKeys(PagedAttention):
    """Stores keys as they are before RoPE."""

    def norm_rope_store(self, layer: LayerSpec, qkv: torch.Tensor, *given: Any) -> torch.Tensor:
        q = super().norm_rope_store(layer, qkv, *given)
        _, k, v = qkv.view(len(qkv), -1, layer.head_dim).split((layer.q_heads, layer.kv_heads, layer.kv_heads), dim=1)
        self.pool.store(layer.index, k, v, given[-1])
        return q


class ClaimsGroups(PagedAttention):
    """Says that it reads no page behind a window, and reads them."""

    def needs(self) -> AttnNeeds:
        return replace(super().needs(), groups=True)


@pytest.mark.parametrize("wrong", [NoNorm, UnrotatedKeys])
def test_faulty_attend(wrong: type) -> None:
    """The attention kit finds each backend that fuses wrongly, by `attend` alone."""
    assert set(failures(kit_of(AttentionConformance, wrong))) == {"test_attend"}


@pytest.mark.parametrize("wrong", [TopLeft, NoMask, WrongGroups, ContiguousPages, ClaimsGroups])
def test_faulty_backends(wrong: type) -> None:
    """The attention kit finds each faulty backend."""
    failed = failures(kit_of(AttentionConformance, wrong))
    assert "test_dense_attention" in failed, failed


def test_attention_message() -> None:
    """The attention kit names the row and the query that are wrong."""
    failed = failures(kit_of(AttentionConformance, TopLeft))
    assert "query 0 of row 0 (1 positions before, 1 computed) is off by" in failed["test_one_row"]


# ---- caches ----------------------------------------------------------------------------------------------------


class SplitLosesUsers(RadixCache):
    """Forgets the locks of a node that is split."""

    def _split(self, node: Node, at: int) -> Node:
        upper = super()._split(node, at)
        upper.users = 0
        return upper


class MatchesTooFar(RadixCache):
    """Treats different tokens of a node as equal."""

    def _common(self, a: Any, b: Any) -> int:
        return len(a) // self.page_size


class MatchIsUse(RadixCache):
    """Counts a match as a use of the pages, which changes the order of eviction."""

    def match(self, key: Key) -> MatchResult:
        found = super().match(key)
        self.lock(found.handle)
        self.unlock(found.handle)
        return found


class ForgetsAncestors(RadixCache):
    """Does not lock the parent of a locked node."""

    def lock(self, handle: Handle) -> None:
        super().lock(handle)
        if handle.node.parent is not None and handle.node.parent.parent is not None:
            handle.node.parent.users -= 1


class OneNamespace(RadixCache):
    """Ignores the namespace."""

    def match(self, key: Key) -> MatchResult:
        return super().match(Key(None, key.ids))

    def insert(self, base: Handle | None, key: Key, start: int, pages: I32) -> InsertResult:
        return super().insert(base, Key(None, key.ids), start, pages)


class KeepsTheCallersArray(RadixCache):
    """Stores the caller's array instead of a copy."""

    def _grow(self, parent: Node, ids: Any, pages: I32) -> Node:
        node = super()._grow(parent, ids, pages)
        node.pages = pages
        return node


class HoldsWithoutSaying(HoldsNothing):
    """Reports that it stored pages although ``reuses`` is False."""

    def insert(self, base: Any, key: Key, start: int, pages: I32) -> InsertResult:
        return InsertResult(None, np.asarray(pages, np.int32))


@pytest.mark.parametrize(
    "wrong", [SplitLosesUsers, MatchesTooFar, MatchIsUse, ForgetsAncestors, OneNamespace, KeepsTheCallersArray]
)
def test_faulty_caches(wrong: type) -> None:
    """The cache kit finds each faulty cache."""
    failed = failures(kit_of(CacheConformance, wrong))
    assert "test_random_histories" in failed, failed


def test_wrong_reuses() -> None:
    """The cache kit finds a cache whose ``reuses`` is wrong."""
    assert failures(kit_of(CacheConformance, lambda size: HoldsWithoutSaying()))


def test_other_eviction_order() -> None:
    """A cache that evicts the newest pages first passes the kit only with ``lru=False``."""

    class Newest(RadixCache):
        def _offer(self, node: Node) -> None:
            node.stamp = -abs(node.stamp)
            super()._offer(node)

    assert failures(kit_of(CacheConformance, Newest, lru=True))
    assert not failures(kit_of(CacheConformance, Newest, lru=False))


def test_shorter_matches() -> None:
    """A cache that goes on only from every second page passes the kit only with ``longest=False``."""

    class Even(RadixCache):
        rematch = None  # type: ignore[assignment]

        def match(self, key: Key) -> MatchResult:
            pages = len(super().match(key).pages) // 2 * 2
            return super().match(Key(key.namespace, key.ids[: pages * self.page_size]))

    assert failures(kit_of(CacheConformance, Even, histories=40))
    assert not failures(kit_of(CacheConformance, Even, longest=False, histories=40))
    wrong = failures(kit_of(CacheConformance, MatchesTooFar, longest=False, histories=40))
    assert "test_random_histories" in wrong, wrong


# ---- policies ----------------------------------------------------------------------------------------------------


class Policy:
    """A correct policy."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        rows = [(r.uid, n) for r in running if (n := budget.grant(r, r.num_remaining_tokens or 1))]
        return Plan(rows + [(w.uid, n) for w in waiting if (n := budget.grant(w, w.num_tokens - w.num_cached_tokens))])


class Empty(Policy):
    """Returns empty plans."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        return Plan([])


class Greedy(Policy):
    """Plans all tokens without asking the budget."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        return Plan(
            [(r.uid, r.num_remaining_tokens or 1) for r in running]
            + [(w.uid, w.num_tokens - w.num_cached_tokens) for w in waiting]
        )


class Nondeterministic(Policy):
    """Returns a different plan each time."""

    def __init__(self) -> None:
        self.asked = 0

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        self.asked += 1
        return super().plan(waiting[: self.asked % 3], running, budget)


class Twice(Policy):
    """Plans the first request twice."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        plan = super().plan(waiting, running, budget)
        return Plan([*plan.rows, *plan.rows[:1]])


class NoPlan(Policy):
    """Returns a list instead of a `Plan`."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        return super().plan(waiting, running, budget).rows  # type: ignore[return-value]


def test_correct_policy() -> None:
    """A correct policy passes the policy kit."""
    assert not failures(kit_of(PolicyConformance, Policy, runs=12))


@pytest.mark.parametrize("wrong", [Empty, Greedy, Nondeterministic, Twice, NoPlan])
def test_faulty_policies(wrong: type) -> None:
    """The policy kit finds each faulty policy."""
    assert failures(kit_of(PolicyConformance, wrong, runs=12))
