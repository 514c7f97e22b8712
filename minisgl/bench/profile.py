"""``python -m minisgl.bench profile``: does the device ever wait for the host while many requests decode, and on what
does it spend its time?

Host: seconds of a scheduling turn that are not spent waiting for a result; a sync anywhere between launch and result
is an error. Device: kernels as `torch.profiler` saw them, and what lay between them.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from minisgl.bench.arguments import add_json, add_options, parse, write_json
from minisgl.bench.measure import queue
from minisgl.bench.offline import machine
from minisgl.bench.workload import random_asks
from minisgl.config import ConfigError
from minisgl.core import Engine, SamplingParams, Step, StepResult
from minisgl.engine.followers import start_engine
from minisgl.options.compose import compose, plain_errors
from minisgl.plugin_manager.manager import PluginManager
from minisgl.scheduler import Scheduler
from minisgl.scheduler.build import build_scheduler


@dataclass(frozen=True)
class Timeline:
    """What the device did: milliseconds from the first kernel's begin to the last one's end, and of that with nothing
    on the device. ``kernels``: name, milliseconds, launches; the longest first."""

    span: float
    idle: float
    kernels: list[tuple[str, float, int]]


@dataclass(frozen=True)
class Report:
    """Milliseconds of one decode step of ``rows`` requests; ``host`` does not count waiting for the device, and
    ``launch`` is the engine's part of it."""

    rows: int
    steps: int
    step_p50: float
    host_p50: float
    host_p99: float
    launch_p50: float
    idle_share: float
    timeline: Timeline


class Watched:
    """An engine that notes how long the host waited in it for results, and lets nobody wait elsewhere."""

    def __init__(self, engine: Engine):
        self._engine, self.spec = engine, engine.spec
        self.eos_ids: frozenset[int] = getattr(engine, "eos_ids", frozenset())
        self.waited = self.launching = 0.0

    def launch(self, step: Step) -> None:
        torch.cuda.set_sync_debug_mode("error")
        begin = time.perf_counter()
        try:
            self._engine.launch(step)
        finally:
            self.launching += time.perf_counter() - begin
            torch.cuda.set_sync_debug_mode("default")

    def result(self) -> StepResult:
        begin = time.perf_counter()
        result = self._engine.result()
        self.waited += time.perf_counter() - begin
        return result

    def close(self) -> None:
        self._engine.close()


def main(argv: Sequence[str]) -> None:
    p = argparse.ArgumentParser(prog="python -m minisgl.bench profile", description=__doc__)
    add_options(p, "as for `python -m minisgl`")
    p.add_argument("--rows", type=int, default=256, help="requests that decode at the same time (default 256)")
    p.add_argument("--input", type=int, default=512, help="tokens of each prompt (default 512)")
    p.add_argument("--steps", type=int, default=100, help="steps measured, and then as many profiled (default 100)")
    p.add_argument("--temperature", type=float, default=0.0, help="0 (the default) is greedy")
    add_json(p)
    args = parse(p, argv)
    with plain_errors("minisgl.bench"):
        if not torch.cuda.is_available():
            raise ConfigError("a device's timeline is taken on a GPU, and torch finds no CUDA device here.")
        manager = PluginManager.load()
        config = compose(manager, [f"max_running_requests={max(args.rows, 1)}", *args.options])
        engine = start_engine(config, manager)
        try:
            where = machine(str(engine.device), str(engine.dtype).removeprefix("torch."))
            watched = Watched(engine)
            scheduler = build_scheduler(config, manager, watched)
            report = measure(scheduler, watched, args.rows, args.input, args.steps, args.temperature)
        finally:
            engine.close()
    show(report, f"{config.model} on {where['device']} ({where['dtype']}, torch {where['torch']})")
    write_json(args, {"options": args.options, "machine": where, "report": asdict(report)})


def measure(scheduler: Scheduler, watched: Watched, rows: int, prompt: int, steps: int, temperature: float) -> Report:
    """Let ``rows`` requests decode: ``steps`` turns under the clock, then as many under the profiler."""
    from torch.profiler import ProfilerActivity, profile

    warm = 20
    output = 2 * steps + 2 * warm + prompt_steps(scheduler, rows * prompt)
    for uid, ask in enumerate(random_asks(rows, (prompt, prompt), (output, output), scheduler.spec.vocab_size, 0)):
        params = SamplingParams(max_tokens=output, temperature=temperature, seed=uid, ignore_eos=True)
        queue(scheduler, uid, ask.prompt, params)
    while scheduler.stats()["output_tokens"] < rows:
        scheduler.step()
    turns(scheduler, watched, warm)
    whole, manager, launch = turns(scheduler, watched, steps)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        turns(scheduler, watched, steps)
        torch.cuda.synchronize()
    events = [
        (e.name, e.time_range.start / 1e3, e.time_range.end / 1e3)
        for e in profiler.events() or ()
        if e.device_type == torch.autograd.DeviceType.CUDA
    ]
    line = timeline(events)
    for uid in range(rows):
        scheduler.abort_request(uid)
    while scheduler.has_work:
        scheduler.step()
    p50, p99 = np.percentile(manager, (50, 99)).tolist()
    medians = float(np.median(whole)), p50, p99, float(np.median(launch))
    return Report(rows, steps, *medians, line.idle / line.span, line)


def prompt_steps(scheduler: Scheduler, tokens: int) -> int:
    """How many tokens the first requests may have by the time that the last one begins to decode."""
    return 2 + tokens // scheduler.planner.max_prefill_tokens


def turns(scheduler: Scheduler, watched: Watched, steps: int) -> tuple[list[float], list[float], list[float]]:
    """Milliseconds of each of the next turns: in all, without waiting, and of that in the engine's launch."""
    whole, manager, launch = [], [], []
    for _ in range(steps):
        begin, waited, launching = time.perf_counter(), watched.waited, watched.launching
        scheduler.step()
        took = time.perf_counter() - begin
        whole.append(took * 1e3)
        manager.append((took - (watched.waited - waited)) * 1e3)
        launch.append((watched.launching - launching) * 1e3)
    return whole, manager, launch


def timeline(events: Iterable[tuple[str, float, float]]) -> Timeline:
    """From (name, begin, end) of what ran on the device; what runs side by side counts once."""
    by_name: dict[str, list[float]] = defaultdict(list)
    first = last = None
    idle = 0.0
    for name, begin, end in sorted(events, key=lambda e: e[1]):
        by_name[name].append(end - begin)
        if last is None:
            first, last = begin, end
        idle += max(begin - last, 0.0)
        last = max(last, end)
    kernels = [(name, sum(times), len(times)) for name, times in by_name.items()]
    kernels.sort(key=lambda kernel: -kernel[1])
    return Timeline(0.0 if first is None or last is None else last - first, idle, kernels)


def show(report: Report, title: str) -> None:
    table = Table(title=title)
    table.add_column(f"a decode step of {report.rows} requests")
    table.add_column("", justify="right")
    table.add_row("step, p50", f"{report.step_p50:.2f} ms")
    table.add_row("of it the host works, p50 / p99", f"{report.host_p50:.2f} / {report.host_p99:.2f} ms")
    table.add_row("of that it launches, p50", f"{report.launch_p50:.2f} ms")
    table.add_row("the device is idle", f"{report.idle_share:.1%}")
    kernels = Table()
    kernels.add_column("on the device")
    for name in ("ms a step", "launches a step", "share"):
        kernels.add_column(name, justify="right")
    busy = report.timeline.span - report.timeline.idle
    for name, ms, count in report.timeline.kernels[:15]:
        kernels.add_row(name[:60], f"{ms / report.steps:.3f}", f"{count / report.steps:.0f}", f"{ms / busy:.1%}")
    console: Any = Console(width=110)
    console.print(table)
    console.print(kernels)
