"""The scheduler's cost grows linearly: number of operations, and CPU time with a wide margin.

`python -m minisgl.bench host --scale` measures the same workloads at full size.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from minisgl.bench.host_scale import Cost, Scale
from minisgl.core import SamplingParams
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.cache import compare, prefix
from minisgl.plugins.cache.radix import RadixCache
from minisgl.plugins.scheduler import LPM_WINDOW, MAX_SKIPPED
from minisgl.scheduler.page_allocator import OwnerTable
from minisgl.scheduler.planner import MAX_ADMISSIONS
from minisgl.scheduler.scheduler import Scheduler


@pytest.fixture(scope="module")
def scale() -> Scale:
    manager = PluginManager.load(light=True)
    return Scale(compose(manager, []), manager)


def assert_linear(small: Cost, large: Cost) -> None:
    """Check that an item of ``large`` costs less than 3 times as much as an item of ``small``."""
    assert large.per_item_us < 3 * small.per_item_us, f"{small} {large}"


def burst(scale: Scale, rows: int, max_tokens: int) -> Scheduler:
    """Return a scheduler with ``rows`` waiting requests and as many free request-pool rows."""
    scheduler = scale.scheduler(rows, 8 * rows, 256, max_prefill_tokens=1 << 20)
    for uid in range(rows):
        scheduler.add_request(uid, np.full(64, uid, np.int32), SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    return scheduler


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: type, *names: str) -> Counter[str]:
    """Count the calls of these methods of the class ``owner``, by name."""
    calls: Counter[str] = Counter()
    for name in names:
        real = getattr(owner, name)

        def counted(self: Any, *args: Any, name: str = name, real: Any = real) -> Any:
            calls[name] += 1
            return real(self, *args)

        monkeypatch.setattr(owner, name, counted)
    return calls


@pytest.mark.parametrize("rows", [10, 300])
def test_burst(scale: Scale, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests a step admits or ends, the scheduler calls the page allocator 20 times at most."""
    scheduler = burst(scale, rows, max_tokens=4)
    calls = count_calls(monkeypatch, OwnerTable, "allocate", "check_owner")
    while scheduler.has_work:
        calls.clear()
        scheduler.step()
        assert calls.total() <= 20


def test_a_step_admits_a_bounded_number_of_requests(scale: Scale) -> None:
    """A burst of requests with short prompts is admitted over several steps, so that no turn takes long."""
    scheduler = burst(scale, 1000, max_tokens=8)
    running = [0]
    while running[-1] < 1000:
        scheduler.step()
        running.append(scheduler.stats()["num_running_reqs"])
    assert np.diff(running).max() == MAX_ADMISSIONS


def test_abort_of_waiting_requests(scale: Scale) -> None:
    assert_linear(
        min((scale.abort_waiting(500) for _ in range(5)), key=lambda c: c.cpu_ms), scale.abort_waiting(16_000)
    )


def test_waiting_requests_do_not_slow_down_a_turn(scale: Scale) -> None:
    """A turn with 8,000 waiting requests costs less than 3 times as much as a turn with 500."""
    assert_linear(*(min((scale.waiting(n) for _ in range(2)), key=lambda c: c.cpu_ms) for n in (500, 8_000)))


def test_eviction_of_many_leaves(scale: Scale) -> None:
    assert_linear(min((scale.eviction(4_000) for _ in range(3)), key=lambda c: c.cpu_ms), scale.eviction(64_000))


def copies(scale: Scale, count: int, tokens: int) -> Scheduler:
    """Return a scheduler with ``count`` waiting copies of one prompt."""
    scheduler = scale.scheduler(8, 2 * tokens, 2 * tokens)
    prompt = np.arange(2, 2 + tokens, dtype=np.int32)
    for uid in range(count):
        scheduler.add_request(uid, prompt, SamplingParams(max_tokens=4, ignore_eos=True))
    return scheduler


def test_a_prompt_is_hashed_once(scale: Scale, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting prompts whose next page stays the same are not hashed again, however long their cached prefix is."""
    scheduler = copies(scale, 40, 2_000)
    hashed = 0

    def counted(data: bytes) -> int:
        nonlocal hashed
        hashed += len(data) // 4
        return hash(data)

    monkeypatch.setattr(prefix, "hash", counted, raising=False)
    while scheduler.has_work:
        scheduler.step()
    assert 40 * 16 <= hashed <= 40 * 2_000


def test_a_turn_looks_at_few_copies(scale: Scale, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many copies of a prompt wait, a turn matches at most `MAX_SKIPPED` of them, and some per free row."""
    scheduler = copies(scale, 2_000, 2_000)
    matches = count_calls(monkeypatch, RadixCache, "match", "rematch")
    for _ in range(12):
        matches.clear()
        scheduler.step()
        assert matches.total() <= 2 * (MAX_SKIPPED + 4 * 8)


def test_waiting_prompts_are_not_compared_again(scale: Scale, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting request whose cached prefix stays the same costs no comparison of tokens when the cache changes."""
    scheduler = copies(scale, 40, 2_000)
    compared = 0

    def common_pages(a: Any, b: Any, page_size: int) -> int:
        nonlocal compared
        compared += min(len(a), len(b))
        return compare.common_pages(a, b, page_size)

    cache = scheduler.cache_manager.cache
    assert isinstance(cache, RadixCache)
    cache.common_pages = common_pages
    while scheduler.has_work:
        scheduler.step()
    assert compared < 1.5 * 40 * 2_000


def test_window_of_lpm(scale: Scale) -> None:
    """With ``lpm``, turns cost the same however long the cached prefixes of the waiting requests are."""
    short, long = (
        min((scale.longest_prefix_match(LPM_WINDOW, n, turns=20) for _ in range(3)), key=lambda c: c.cpu_ms)
        for n in (512, 16_384)
    )
    assert_linear(short, long)
