"""`cache=groups` on the simulated engine: windows are read exactly, and their pages become free."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minisgl.core import EngineSpec, KVGroup, Req, SamplingParams
from minisgl.plugins.cache.groups import tail_pages
from minisgl.plugins.scheduler.victims import select_victims
from minisgl.scheduler.page_allocator import CACHE
from minisgl.testing import SimViolation
from minisgl.testing.drive import Job, make_plugin
from minisgl.testing.kv_groups import WindowDrive, group
from minisgl.testing.planted import ArrivalOrderPolicy, job
from minisgl.testing.planted_windows import PLANTED_WINDOWS, planted_window
from minisgl.testing.soak import run, run_all

PARTS = 5


def drive(windows: tuple[int, ...] = (-1, 8), page_size: int = 4, chunk: int = 16, **sizes: Any) -> WindowDrive:
    sizes = {"num_pages": 200, "max_running_requests": 4, "max_seq_len": 256, "vocab_size": 50} | sizes
    groups = tuple(group(window, page_size, chunk) for window in windows)
    spec = EngineSpec(page_size=page_size, groups=groups, **sizes)
    cache = make_plugin("cache", "groups", spec=spec)
    return WindowDrive(spec, cache, ArrivalOrderPolicy(), max_prefill_tokens=chunk)


@pytest.mark.parametrize("what", PLANTED_WINDOWS)
def test_planted_bug_is_found(what: str) -> None:
    """The same workload passes without the planted bug, so the failure is caused by the bug."""
    bug = PLANTED_WINDOWS[what]
    bug.run()
    with planted_window(bug.plant), pytest.raises(AssertionError, match=bug.oracle) as caught:
        bug.run()
    if isinstance(caught.value, SimViolation):
        assert caught.value.rule == bug.oracle


@pytest.mark.parametrize("part", range(PARTS))
def test_random_schedules(part: int) -> None:
    totals, failed = run_all(range(part, 100, PARTS), windows=True)
    assert not failed
    assert min(totals.aborted, totals.cached_tokens, totals.masks, totals.prompt_logprobs) > 0


@pytest.mark.parametrize("what", ["a window freed one page early", "a hit without the window's pages"])
def test_random_schedules_find_the_bug(what: str) -> None:
    with planted_window(PLANTED_WINDOWS[what].plant):
        assert any(_fails(seed) for seed in range(60))


def _fails(seed: int) -> bool:
    try:
        run(seed, windows=True)
    except (AssertionError, ValueError, LookupError):
        return True
    return False


@pytest.mark.parametrize("page_size", [1, 16])
def test_window_bounds_the_pages_of_a_long_request(page_size: int) -> None:
    """However long the request gets, its pages in the group with a window are those of the window and the chunk."""
    window, chunk = 8, 16
    held = drive((window,), page_size, chunk, num_pages=64 if page_size == 1 else 8)
    held.add(Job(1, [1 + i % 40 for i in range(150)], SamplingParams(max_tokens=100, temperature=0.0)))
    most = {True: 0, False: 0}
    owner, table = held.scheduler.cache_manager.allocator.owner, held.scheduler.request_table
    while held.scheduler.has_work:
        held.step()
        in_use = int(np.count_nonzero(owner == 1)) + int((held.scheduler.cache_manager.allocator.ref_counts > 0).sum())
        is_prefill = table.num_computed_tokens[0] < 150
        most[bool(is_prefill)] = max(most[bool(is_prefill)], in_use)
    held.check_idle()
    # Locked pages of the cache wait for the result of at most two steps.
    assert most[True] <= -(-(window - 1 + 3 * chunk) // page_size) + 2
    assert most[False] <= -(-(window + 3 * chunk) // page_size) + 2
    assert len(held.report.tokens[1]) == 100


def test_pool_smaller_than_the_request() -> None:
    """Without a group that keeps all pages, a request may be longer than the pool."""
    small = drive((8, 8), num_pages=40)
    assert small.spec.max_tokens_per_request == 256 > 40 * 4
    small.run([job(1, 200, 56), job(2, 100, 56, first=9)])
    assert small.report.counts.admissions[1] == 1


def test_hit_needs_the_window_only() -> None:
    """A prefix is reused although the pages behind its window were evicted from the group with the window."""
    hit = drive((-1, 8))
    hit.run([job(1, 64, 4)])
    cache = hit.scheduler.cache_manager.cache
    owner = hit.scheduler.cache_manager.allocator.owner
    before = int(np.count_nonzero(owner == CACHE))
    evicted = cache.evict(10)  # behind the window: these pages were unlocked first
    hit.scheduler.cache_manager.allocator.free_evicted(evicted)
    hit.scheduler.cache_manager._version += 1
    assert int(np.count_nonzero(owner == CACHE)) == before - 10
    hit.run([job(2, 66, 4)])
    assert hit.report.finished[2].cached_tokens == 64


def test_hit_ends_where_all_groups_have_their_pages() -> None:
    """A prompt that continues in the middle of another finds only what the group with the window still has."""
    shared = drive((-1, 8))
    shared.run([job(1, 64, 30)])
    branch = [*job(1, 40).prompt, 49, 48, 47, 46, 45]
    shared.run([Job(2, branch, SamplingParams(max_tokens=4, temperature=0.0))])
    assert shared.report.finished[2].cached_tokens == 40  # nothing was evicted: the pages behind the window are there
    cache = shared.scheduler.cache_manager.cache
    full = {page for node, g in cache.owners.values() for page in [node.pages[0]] if g == 0}
    windows = [page for page in cache.unused if page not in full]
    for page in windows:
        cache.unused = {page: None} | {p: None for p in cache.unused if p != page}
        shared.scheduler.cache_manager.allocator.free_evicted(cache.evict(1))
    shared.scheduler.cache_manager._version += 1
    shared.run([Job(3, [*branch[:40], 1, 2], SamplingParams(max_tokens=4, temperature=0.0))])
    assert shared.report.finished[3].cached_tokens == 0  # the group without a window alone is no prefix


def test_next_turn_finds_all_whole_pages() -> None:
    """Wherever in a page the request ends: what a query at the last page border reads is kept until then."""
    for tokens in range(16, 20):
        turns = drive((-1, 8, 5))
        turns.run([job(1, 40, tokens)])
        turns.run([Job(2, [*job(1, 40).prompt, *turns.report.tokens[1], 1, 2], SamplingParams(max_tokens=1))])
        computed = 40 + tokens - 1  # not the last token
        assert turns.report.finished[2].cached_tokens == computed // 4 * 4


def test_long_hit_of_windows_fits_into_an_idle_pool() -> None:
    """The columns behind the windows, which need no page, are not counted where requests are retracted."""
    hit = drive((-1, 8, 8, 8), num_pages=60)
    hit.run([job(1, 100, 4)])
    manager, planner = hit.scheduler.cache_manager, hit.scheduler.planner
    req = Req(2, np.asarray(job(2, 100, 4).prompt, np.int32), SamplingParams(max_tokens=4), 1)
    req.max_len = 104
    assert len(manager.match(req).pages) > 20
    assert select_victims(planner, [req]) == ([req], [])


def test_retraction_with_groups() -> None:
    crowded = drive((-1, 8, 8), num_pages=46, max_running_requests=4)
    crowded.scheduler.cache_manager.reserve.mean_length = 0.0
    crowded.run([job(uid, 20, 60, first=9 * uid) for uid in range(1, 5)])
    assert crowded.report.retractions > 0


def test_model_without_windows() -> None:
    one = drive((-1,))
    assert one.spec.groups == (KVGroup(),)
    one.run([job(1, 40, 8), job(2, 44, 8, arrive=8)])
    assert one.report.finished[2].cached_tokens == 40


@pytest.mark.parametrize(
    ("window", "page_size", "pages"), [(1, 4, 0), (2, 4, 1), (5, 4, 1), (6, 4, 2), (9, 1, 8), (-1, 4, 2**31 - 1)]
)
def test_tail_pages(window: int, page_size: int, pages: int) -> None:
    assert tail_pages(window, page_size) == pages
