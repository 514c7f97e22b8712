"""`cache=naive`: the core's manager of pages moves them, and nothing of a prefix cache is loaded."""

from __future__ import annotations

from minisgl.core import EngineSpec
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.scheduler.build import build_scheduler
from minisgl.scheduler.cache_manager import CacheManager
from minisgl.testing.null import NullEngine

SPEC = EngineSpec(page_size=4, num_pages=20, max_running_requests=4, max_seq_len=40, vocab_size=50)


def test_naive_loads_no_prefix_cache() -> None:
    for cache, reuses in (("naive", False), ("radix", True)):
        manager = PluginManager.load()
        scheduler = build_scheduler(compose(manager, [f"cache={cache}"]), manager, NullEngine(SPEC))  # type: ignore[arg-type]
        assert ("minisgl.plugins.cache.prefix" in [plugin.name for plugin in manager.plugins]) == reuses
        assert (type(scheduler.cache_manager) is CacheManager) != reuses
