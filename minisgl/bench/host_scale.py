"""``python -m minisgl.bench host --scale``: the scheduler's CPU time under large queues, bursts and full caches.

Each workload measures one operation whose cost could grow faster than linearly. The times are CPU seconds of the
process (`time.process_time`), so a busy machine changes them little.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console
from rich.table import Table

from minisgl.config import Config
from minisgl.core import I32, EngineSpec, SamplingParams
from minisgl.plugin_manager.manager import PluginManager
from minisgl.scheduler.build import build_scheduler
from minisgl.scheduler.scheduler import Scheduler
from minisgl.testing.null import NullEngine

VOCABULARY = 150_000


@dataclass(frozen=True)
class Cost:
    """The CPU time of one workload.

    ``items`` is the number of requests, tokens or pages that share ``cpu_ms``. ``worst_turn_ms`` is the longest turn of
    the scheduler's loop, 0 if the workload runs no turn. ``mib`` is the memory that the workload allocates besides the
    prompts.
    """

    what: str
    items: int
    cpu_ms: float
    worst_turn_ms: float = 0.0
    mib: float = 0.0

    @property
    def per_item_us(self) -> float:
        """CPU time in microseconds for one item."""
        return self.cpu_ms * 1e3 / self.items


class Scale:
    """The workloads. Every method returns `Cost` objects; its arguments are the sizes."""

    def __init__(self, config: Config, manager: PluginManager):
        self.config, self.manager = config, manager

    def scheduler(
        self, rows: int, num_pages: int, max_seq_len: int, page_size: int | None = None, **options: int
    ) -> Scheduler:
        """Return a scheduler on an engine that computes nothing. ``options`` change fields of the config."""
        spec = EngineSpec(page_size or self.config.page_size, num_pages, rows, max_seq_len, VOCABULARY)
        return build_scheduler(replace(self.config, **options), self.manager, NullEngine(spec))  # type: ignore[arg-type]

    def all(self) -> list[Cost]:
        """Return the costs of all workloads, with the sizes of the documentation."""
        return [
            self.burst(1_000),
            self.abort_waiting(30_000),
            *self.copies(10_000, 16_384),
            self.hashing(64, 16_384),
            self.eviction(1_000_000),
            self.longest_prefix_match(128, 32_768),
            self.waiting(10_000),
            self.retraction(10_000),
        ]

    def burst(self, rows: int) -> Cost:
        """Admit ``rows`` short requests that arrive at once, compute 4 tokens of each, and end them."""
        size = self.config.page_size
        scheduler = self.scheduler(rows, 8 * rows, 8 * size, max_prefill_tokens=1 << 20)
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        for uid, prompt in enumerate(_prompts(rows, 4 * size)):
            scheduler.add_request(uid, prompt, params)
        turns = _turns_ms(scheduler)
        return Cost("burst of short requests", rows, sum(turns), max(turns))

    def abort_waiting(self, requests: int) -> Cost:
        """Abort ``requests`` waiting requests, the last ones first."""
        scheduler = self.scheduler(1, 64, 64)
        for uid, prompt in enumerate(_prompts(requests, 4)):
            scheduler.add_request(uid, prompt, SamplingParams(max_tokens=4))
        order = range(requests - 1, -1, -1)

        def abort() -> None:
            for uid in order:
                scheduler.abort_request(uid)

        return Cost("abort waiting requests", requests, _cpu_ms(abort))

    def copies(self, requests: int, tokens: int, turns: int = 12) -> list[Cost]:
        """Add ``requests`` copies of one prompt of ``tokens`` tokens, then run the first ``turns`` turns."""
        pages = -(-tokens // self.config.page_size) + 512
        scheduler = self.scheduler(256, pages, 2 * tokens)
        (prompt,) = _prompts(1, tokens)
        before = _resident_mib()

        def add() -> None:
            for uid in range(requests):
                scheduler.add_request(uid, prompt, SamplingParams(max_tokens=4, ignore_eos=True))

        added = _cpu_ms(add)
        times = _turns_ms(scheduler, turns)
        mib = _resident_mib() - before - requests * tokens * 4 / 2**20
        return [
            Cost("add copies of a prompt", requests, added, mib=mib),
            Cost("first turns with the copies", turns, sum(times), max(times)),
        ]

    def hashing(self, requests: int, tokens: int) -> Cost:
        """Add ``requests`` different prompts of ``tokens`` tokens each. An item is a token."""
        scheduler = self.scheduler(1, 2 * tokens, 2 * tokens)
        prompts = _prompts(requests, tokens)

        def add() -> None:
            for uid, prompt in enumerate(prompts):
                scheduler.add_request(uid, prompt, SamplingParams(max_tokens=4))

        return Cost("add prompts, in tokens", requests * tokens, _cpu_ms(add))

    def eviction(self, pages: int) -> Cost:
        """Evict ``pages`` cached pages of one token, each a leaf of the cache's tree."""
        from minisgl.plugins.cache.base import Key

        cache = self.manager.build("cache", self.config.cache, page_size=1)
        numbers = np.arange(pages, dtype=np.int32)
        for i in range(pages):
            cache.insert(None, Key(None, numbers[i : i + 1]), 0, numbers[i : i + 1])
        return Cost("evict pages of one token", pages, _cpu_ms(lambda: cache.evict(pages)))

    def longest_prefix_match(self, requests: int, tokens: int, turns: int = 40) -> Cost:
        """Run turns with at least ``requests`` waiting requests, whose prefixes of ``tokens`` tokens are cached.

        The scheduling policy's order is ``lpm``. Requests end and are admitted in every second turn, so that the cache
        changes. An item is a turn.
        """
        config = replace(self.config, scheduler=type(self.config.scheduler)(order="lpm"))
        pages = 8 * (-(-tokens // config.page_size)) + 512
        scheduler = Scale(config, self.manager).scheduler(2, pages, 2 * tokens, max_prefill_tokens=1 << 20)
        prompts = _prompts(4, tokens)
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        for uid, prompt in enumerate(prompts):
            scheduler.add_request(uid, prompt, params)
        while scheduler.has_work:
            scheduler.step()
        for uid in range(4, 4 + requests + turns):
            scheduler.add_request(uid, np.concatenate((prompts[uid % 4], np.full(20, uid, np.int32))), params)
        times = _turns_ms(scheduler, turns)
        return Cost("turns with lpm", turns, sum(times), max(times))

    def waiting(self, requests: int, turns: int = 50) -> Cost:
        """Run turns with 256 running requests that end and start, and ``requests`` waiting. An item is a turn."""
        size = self.config.page_size
        scheduler = self.scheduler(256, 256 * 8, 16 * size, max_prefill_tokens=1 << 14)
        for uid, prompt in enumerate(_prompts(requests + 256, 4 * size + 3)):
            scheduler.add_request(uid, prompt, SamplingParams(max_tokens=5 + uid % 32, ignore_eos=True))
        times = _turns_ms(scheduler, turns)
        return Cost("turns with waiting requests", turns, sum(times), max(times))

    def retraction(self, requests: int, turns: int = 50) -> Cost:
        """As `waiting`, with a pool so small that requests are retracted. An item is a turn."""
        size = self.config.page_size
        scheduler = self.scheduler(256, 800, 32 * size, max_prefill_tokens=1 << 14)
        for uid, prompt in enumerate(_prompts(requests + 256, 2 * size + 3)):
            scheduler.add_request(uid, prompt, SamplingParams(max_tokens=20 * size, ignore_eos=True))
        for _ in range(2 * size):
            scheduler.step()
        times = _turns_ms(scheduler, turns)
        return Cost("turns with retractions", turns, sum(times), max(times))


def _prompts(count: int, length: int) -> list[I32]:
    random = np.random.default_rng(0)
    return list(random.integers(2, VOCABULARY, (count, length), np.int32))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect garbage now, and not while the context is open."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _cpu_ms(call: Callable[[], object]) -> float:
    """Return the CPU time of ``call`` in milliseconds."""
    with _no_garbage_collection():
        begin = time.process_time()
        call()
        return (time.process_time() - begin) * 1e3


def _turns_ms(scheduler: Scheduler, turns: int | None = None) -> list[float]:
    """Return the CPU time in milliseconds of each of the next ``turns`` turns, or of all until no work is left."""
    times: list[float] = []
    with _no_garbage_collection():
        while scheduler.has_work and len(times) != turns:
            begin = time.process_time()
            scheduler.step()
            times.append((time.process_time() - begin) * 1e3)
    return times


def _resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


def show(costs: list[Cost]) -> None:
    """Print a table of the costs."""
    table = Table(title="CPU time of the scheduler, ms")
    for name in ("what", "items", "CPU ms", "µs per item", "worst turn, ms", "MiB"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for c in costs:
        turn, mib = (f"{c.worst_turn_ms:.2f}" if c.worst_turn_ms else "", f"{c.mib:.0f}" if c.mib else "")
        table.add_row(c.what, f"{c.items:,}", f"{c.cpu_ms:.1f}", f"{c.per_item_us:.3f}", turn, mib)
    Console().print(table)
