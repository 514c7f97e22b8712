"""``python -m minisgl.bench profile``: the timeline of the GPU while many requests decode.

Of the host, it measures the time of a scheduling turn without the waiting for a result; a device synchronization during
a launch is an error. Of the device, it measures kernels with `torch.profiler`, and the idle time between kernels.
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
from minisgl.bench.workload import random_requests
from minisgl.config import ConfigError
from minisgl.core import Engine, SamplingParams, Step, StepResult, TokenMasks
from minisgl.engine.build import start_engine
from minisgl.options.compose import compose, plain_errors
from minisgl.plugin_manager.manager import PluginManager
from minisgl.scheduler import Scheduler
from minisgl.scheduler.build import build_scheduler


@dataclass(frozen=True)
class Timeline:
    """The timeline of the device.

    ``span`` is the time from the begin of the first kernel to the end of the last kernel, ``idle`` the part of it in
    which no kernel ran, both in milliseconds. ``kernels`` are (name, milliseconds, launches), the longest first.
    """

    span: float
    idle: float
    kernels: list[tuple[str, float, int]]


@dataclass(frozen=True)
class Report:
    """Milliseconds of one decode step of ``rows`` requests.

    ``host`` is the time of the step without waiting for the device. ``launch`` is the part of it inside the engine's
    ``launch``.
    """

    rows: int
    steps: int
    step_p50: float
    host_p50: float
    host_p99: float
    launch_p50: float
    idle_share: float
    timeline: Timeline


class TimedEngine:
    """An engine that wraps another and measures how long ``launch`` takes and how long ``result`` waits.

    A device synchronization inside ``launch`` raises an error.
    """

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

    def sample(self, masks: TokenMasks) -> None:
        self._engine.sample(masks)

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
    p.add_argument("--input", type=int, default=512, help="prompt length in tokens (default 512)")
    p.add_argument("--steps", type=int, default=100, help="steps to measure, and then to profile (default 100)")
    p.add_argument("--temperature", type=float, default=0.0, help="sampling temperature; 0 (the default) is greedy")
    add_json(p)
    args = parse(p, argv)
    with plain_errors("minisgl.bench"):
        if not torch.cuda.is_available():
            raise ConfigError("this benchmark needs a GPU, but torch finds no CUDA device.")
        manager = PluginManager.load()
        config = compose(manager, [f"max_running_requests={max(args.rows, 1)}", *args.options])
        engine = start_engine(config, manager)
        try:
            where = machine(str(engine.device), str(engine.dtype).removeprefix("torch."))
            timed = TimedEngine(engine)
            scheduler = build_scheduler(config, manager, timed)
            report = measure(scheduler, timed, args.rows, args.input, args.steps, args.temperature)
        finally:
            engine.close()
    show(report, f"{config.model} on {where['device']} ({where['dtype']}, torch {where['torch']})")
    write_json(args, {"options": args.options, "machine": where, "report": asdict(report)})


def measure(scheduler: Scheduler, timed: TimedEngine, rows: int, prompt: int, steps: int, temperature: float) -> Report:
    """Let ``rows`` requests decode: first ``steps`` turns with a clock, then ``steps`` turns with the profiler."""
    from torch.profiler import ProfilerActivity, profile

    warmup = 20
    output = 2 * steps + 2 * warmup + prompt_steps(scheduler, rows * prompt)
    for uid, request in enumerate(
        random_requests(rows, (prompt, prompt), (output, output), scheduler.spec.vocab_size, 0)
    ):
        params = SamplingParams(max_tokens=output, temperature=temperature, seed=uid, ignore_eos=True)
        queue(scheduler, uid, request.prompt_ids, params)
    while scheduler.stats()["output_tokens"] < rows:
        scheduler.step()
    turns(scheduler, timed, warmup)
    total, host, launch = turns(scheduler, timed, steps)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        turns(scheduler, timed, steps)
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
    p50, p99 = np.percentile(host, (50, 99)).tolist()
    medians = float(np.median(total)), p50, p99, float(np.median(launch))
    return Report(rows, steps, *medians, line.idle / line.span, line)


def prompt_steps(scheduler: Scheduler, tokens: int) -> int:
    """Return the most output tokens that a request can gain before the last of the requests begins to decode."""
    return 2 + tokens // scheduler.planner.max_prefill_tokens


def turns(scheduler: Scheduler, timed: TimedEngine, steps: int) -> tuple[list[float], list[float], list[float]]:
    """Return the milliseconds of each of the next turns: total, total minus waiting, and ``launch`` of the engine."""
    total, host, launch = [], [], []
    for _ in range(steps):
        begin, waited, launching = time.perf_counter(), timed.waited, timed.launching
        scheduler.step()
        seconds = time.perf_counter() - begin
        total.append(seconds * 1e3)
        host.append((seconds - (timed.waited - waited)) * 1e3)
        launch.append((timed.launching - launching) * 1e3)
    return total, host, launch


def timeline(events: Iterable[tuple[str, float, float]]) -> Timeline:
    """Return the timeline of events (name, begin, end), in milliseconds. Time with several events counts once."""
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
    table.add_column(f"decode step of {report.rows} requests")
    table.add_column("", justify="right")
    table.add_row("step, p50", f"{report.step_p50:.2f} ms")
    table.add_row("host time without waiting, p50 / p99", f"{report.host_p50:.2f} / {report.host_p99:.2f} ms")
    table.add_row("host time in launch, p50", f"{report.launch_p50:.2f} ms")
    table.add_row("device idle", f"{report.idle_share:.1%}")
    kernels = Table()
    kernels.add_column("kernel")
    for name in ("ms per step", "launches per step", "share"):
        kernels.add_column(name, justify="right")
    busy = report.timeline.span - report.timeline.idle
    for name, ms, count in report.timeline.kernels[:15]:
        kernels.add_row(name[:60], f"{ms / report.steps:.3f}", f"{count / report.steps:.0f}", f"{ms / busy:.1%}")
    console: Any = Console(width=110)
    console.print(table)
    console.print(kernels)
