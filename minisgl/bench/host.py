"""``python -m minisgl.bench host``: the host time of one scheduling step, without a model or a device.

The real scheduler, cache and policy run on an engine that computes nothing. The host time of a step should not depend
on the context lengths, and only weakly on the number of rows: if the host needs longer than the device, the device
waits.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from minisgl.bench.arguments import add_json, add_options, parse, write_json
from minisgl.bench.host_scale import Scale
from minisgl.bench.host_scale import show as show_costs
from minisgl.config import Config
from minisgl.core import I32, EngineSpec, Req, SamplingParams, StepResult
from minisgl.options.compose import compose, plain_errors
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.speculation import DraftProposer
from minisgl.scheduler.build import build_scheduler
from minisgl.scheduler.scheduler import Scheduler
from minisgl.testing.null import NullEngine

CONTEXTS = (1024, 32768)
ROWS = (1, 16, 64, 128, 256)
BLOCK = 25
"""Number of steps measured at once. Blocks of the two contexts alternate, so that a busy machine slows down both."""
VOCABULARY = 150_000
DRAFTS = 4
"""Drafts of each request in a step that verifies drafts."""
DRAFT_ROWS = (1, 16, 64)


@dataclass(frozen=True)
class Point:
    """Microseconds of one step: statistics over ``steps`` steps of one workload."""

    what: str
    context: int
    rows: int
    steps: int
    median: float
    mean: float
    p99: float


@dataclass(frozen=True)
class Fit:
    """Microseconds of a decode step as ``fixed + per_row · rows``: the least-squares line through the medians."""

    context: int
    fixed: float
    per_row: float


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m minisgl.bench host", description=__doc__)
    add_options(p, "as for `python -m minisgl`")
    p.add_argument("--steps", type=int, default=300, help="steps measured for each point (default 300)")
    add_json(p)
    p.add_argument(
        "--scale", action="store_true", help="measure the CPU time of large queues, bursts and evictions instead"
    )
    p.add_argument("--profile", action="store_true", help="print the time of each function with 256 rows instead")
    return p


def main(argv: Sequence[str]) -> None:
    args = parse(parser(), argv)
    with plain_errors("minisgl.bench"):
        manager = PluginManager.load(light=True)
        config = compose(manager, args.options)
        if args.profile:
            profile(config, manager, args.steps)
            return
        if args.scale:
            costs = Scale(config, manager).all()
            show_costs(costs)
            report = [asdict(cost) for cost in costs]
            write_json(args, {"machine": machine(), "options": list(args.options), "costs": report})
            return
        points = measure(config, manager, args.steps)
    show(points)
    write_json(args, {"machine": machine(), "options": list(args.options), "points": [asdict(p) for p in points]})


def measure(config: Config, manager: PluginManager, steps: int) -> list[Point]:
    """Return all points: decode for each context and number of rows, prefill at each context, and a long queue."""
    points = []
    for rows in ROWS:
        schedulers = {context: decoding(config, manager, context, rows, steps) for context in CONTEXTS}
        times: dict[int, list[float]] = {context: [] for context in CONTEXTS}
        for _ in range(-(-steps // BLOCK)):
            for context, scheduler in schedulers.items():
                times[context] += timed(scheduler, BLOCK)
        points += [point("decode", context, rows, times[context]) for context in CONTEXTS]
    for rows in DRAFT_ROWS:
        seconds = timed(drafting(config, manager, rows, steps), steps)
        points.append(point(f"decode, {DRAFTS} drafts", CONTEXTS[0], rows, seconds))
    points += prefill(config, manager)
    busy = decoding(config, manager, CONTEXTS[0], 256, steps, waiting=1000)
    points.append(point("decode, 1000 waiting", CONTEXTS[0], 256, timed(busy, steps)))
    return points


def decoding(
    config: Config, manager: PluginManager, context: int, rows: int, steps: int, waiting: int = 0
) -> Scheduler:
    """Return a warmed-up scheduler in which ``rows`` requests decode, and ``waiting`` more requests wait.

    The prompts have ``context`` to ``context + page_size - 1`` tokens, so that pages of different requests fill up at
    different steps.
    """
    spec = _spec(config, context, rows, steps)
    scheduler = build_scheduler(_one_chunk(config), manager, NullEngine(spec))
    _begin(scheduler, context, rows)
    random, params = np.random.default_rng(1), SamplingParams(max_tokens=steps + 10 * BLOCK, ignore_eos=True)
    for uid in range(rows, rows + waiting):
        scheduler.add_request(uid, _prompt(random, 100), params)
    timed(scheduler, BLOCK)
    return scheduler


def drafting(config: Config, manager: PluginManager, rows: int, steps: int) -> Scheduler:
    """Return a warmed-up scheduler whose steps verify `DRAFTS` drafts of each of ``rows`` requests.

    Half of the drafts are accepted. All steps seem to take the same time, so verifying always pays. A plain step is
    measured now and then, as usual.
    """
    spec = _spec(config, CONTEXTS[0], rows, (DRAFTS // 2 + 1) * steps)
    ticks = itertools.count()
    scheduler = build_scheduler(
        _one_chunk(config), manager, _AcceptsHalf(spec), lambda: float(next(ticks)), proposer=_Drafts()
    )
    _begin(scheduler, CONTEXTS[0], rows)
    timed(scheduler, BLOCK)
    return scheduler


class _Drafts(DraftProposer):
    """Proposes the same token for every position."""

    max_drafts = DRAFTS

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return ``limits[i]`` tokens for each request."""
        return [[2] * limit for limit in limits]


class _AcceptsHalf(NullEngine):
    """A `NullEngine` that accepts the first half of `DRAFTS` drafts."""

    def result(self) -> StepResult:
        """Return the result of the oldest unread step; tokens [rows, positions]."""
        step = self._unread.popleft()
        counts = step.num_sampled_tokens
        tokens = np.full((step.rows, max(int(counts.max()), 1)), 2, np.int32)
        return StepResult(step.id, tokens, np.minimum(counts, 1 + DRAFTS // 2))


def _spec(config: Config, context: int, rows: int, tokens: int) -> EngineSpec:
    """Return a specification in which ``rows`` requests can decode ``tokens`` tokens, and more to warm up."""
    size = config.page_size
    max_len = context + size + tokens + 10 * BLOCK
    return EngineSpec(size, (rows + 1) * -(-max_len // size), rows, 2 * max_len, VOCABULARY)


def _one_chunk(config: Config) -> Config:
    """Return the config with room for all prompts in one step."""
    return replace(config, max_prefill_tokens=max(config.max_prefill_tokens, 1 << 20))


def _begin(scheduler: Scheduler, context: int, rows: int) -> None:
    """Add ``rows`` requests and run the scheduler until each of them has its first token."""
    random, size = np.random.default_rng(0), scheduler.spec.page_size
    params = SamplingParams(max_tokens=scheduler.spec.max_seq_len // 2 - context - size, ignore_eos=True)
    for uid in range(rows):
        scheduler.add_request(uid, _prompt(random, context + uid * 5 % size), params)
    while scheduler.stats()["num_waiting_reqs"] or scheduler.stats()["output_tokens"] < rows:
        scheduler.step()


def prefill(config: Config, manager: PluginManager, chunk: int = 512, repeats: int = 8) -> list[Point]:
    """Return one point for each context: steps of a long prompt whose chunk begins at or soon after that position."""
    size, max_len = config.page_size, CONTEXTS[-1] + 8 * chunk
    spec = EngineSpec(size, 2 * -(-max_len // size), 4, 2 * max_len, VOCABULARY)
    near: dict[int, list[float]] = {context: [] for context in CONTEXTS}
    for seed in range(repeats):
        engine = NullEngine(spec)
        scheduler = build_scheduler(replace(config, max_prefill_tokens=chunk), manager, engine)
        scheduler.add_request(0, _prompt(np.random.default_rng(seed), max_len - 2), SamplingParams(max_tokens=1))
        while scheduler.has_work:
            (seconds,) = timed(scheduler, 1)
            start = int(engine.last.num_computed_tokens[0]) if engine.last else 0
            for context, times in near.items():
                if context <= start < context + 6 * chunk:
                    times.append(seconds)
    return [point(f"prefill, chunk {chunk}", context, 1, times) for context, times in near.items()]


def _prompt(random: np.random.Generator, length: int) -> I32:
    return random.integers(2, VOCABULARY, length, np.int32)


def timed(scheduler: Scheduler, steps: int) -> list[float]:
    """Return the seconds of each of the next ``steps`` turns of the scheduler."""
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        scheduler.step()
        times.append(time.perf_counter() - begin)
    return times


def point(what: str, context: int, rows: int, seconds: Sequence[float]) -> Point:
    us = np.asarray(seconds) * 1e6
    statistics = np.median(us), us.mean(), np.percentile(us, 99)
    return Point(what, context, rows, len(us), *(round(float(value), 1) for value in statistics))


def fit(points: Sequence[Point], context: int) -> Fit:
    """Return the line through the medians of the decode points at ``context``."""
    chosen = [p for p in points if p.what == "decode" and p.context == context]
    per_row, fixed = np.polyfit([p.rows for p in chosen], [p.median for p in chosen], 1)
    return Fit(context, round(float(fixed), 1), round(float(per_row), 3))


def show(points: Sequence[Point]) -> None:
    table = Table(title="host time of one scheduling step, µs")
    for name in ("what", "context", "rows", "median", "mean", "p99"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for p in points:
        table.add_row(p.what, str(p.context), str(p.rows), f"{p.median:.0f}", f"{p.mean:.0f}", f"{p.p99:.0f}")
    console = Console()
    console.print(table)
    for line in (fit(points, context) for context in CONTEXTS):
        console.print(f"at {line.context} tokens: {line.fixed:.0f} µs + {line.per_row:.2f} µs per row")
    console.print(" · ".join(f"{name} {value}" for name, value in machine().items()))


def machine() -> dict[str, str]:
    """Return the names of the machine and the software, for the report."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": model, "cores": str(cores), "python": platform.python_version(), "numpy": np.__version__}


def profile(config: Config, manager: PluginManager, steps: int) -> None:
    """Print the time of each function in decode steps of 256 rows."""
    import cProfile
    import pstats

    scheduler = decoding(config, manager, CONTEXTS[0], ROWS[-1], steps)
    profiler = cProfile.Profile()
    profiler.runcall(timed, scheduler, steps)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
