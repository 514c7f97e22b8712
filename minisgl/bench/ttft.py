"""``python -m minisgl.bench ttft``: the time to the first token on an idle engine, by the length of the prompt.

The time runs from adding the request to the scheduler until the token is on the host. All prompts are different, so the
cache contains no prefix of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from minisgl.bench.arguments import add_json, add_options, parse, write_json
from minisgl.bench.measure import Meter, run
from minisgl.bench.offline import machine
from minisgl.bench.workload import random_requests
from minisgl.config import ConfigError
from minisgl.core import SamplingParams
from minisgl.engine.build import start_engine
from minisgl.options.compose import compose, plain_errors
from minisgl.plugin_manager.manager import PluginManager
from minisgl.scheduler.build import build_scheduler
from minisgl.scheduler.scheduler import Scheduler

LENGTHS = (16, 64, 128, 256, 512, 1000, 2000)
WARMUP = 3
"""Number of prompts of each length before the measured prompts, in which kernels are compiled and loaded."""


@dataclass(frozen=True)
class FirstTokenTime:
    """Milliseconds to the first token, for prompts of ``prompt_tokens`` tokens."""

    prompt_tokens: int
    p50: float
    slowest: float


def main(argv: Sequence[str]) -> None:
    p = argparse.ArgumentParser(prog="python -m minisgl.bench ttft", description=__doc__)
    add_options(p, "as for `python -m minisgl`")
    p.add_argument(
        "--input",
        type=int,
        nargs="+",
        default=LENGTHS,
        metavar="N",
        help=f"prompt lengths (default {LENGTHS})",
    )
    p.add_argument("--repeat", type=int, default=15, help="number of prompts of each length (default 15)")
    p.add_argument("--seed", type=int, default=0, help="random seed of the tokens (default 0)")
    add_json(p)
    args = parse(p, argv)
    with plain_errors("minisgl.bench"):
        if min(args.repeat, *args.input) < 1:
            raise ConfigError("--input and --repeat must be at least 1.")
        manager = PluginManager.load()
        config = compose(manager, args.options)
        engine = start_engine(config, manager)
        try:
            where = machine(str(engine.device), str(engine.dtype).removeprefix("torch."))
            meter = Meter(engine)
            lines = measure(build_scheduler(config, manager, meter), meter, args.input, args.repeat, args.seed)
        finally:
            manager.close()
            engine.close()
    show(lines, f"{config.model} on {where['device']} ({where['dtype']}, torch {where['torch']})")
    write_json(args, {"options": args.options, "machine": where, "ttft": [asdict(line) for line in lines]})


def measure(scheduler: Scheduler, meter: Meter, lengths: Sequence[int], repeat: int, seed: int) -> list[FirstTokenTime]:
    """Serve ``repeat`` prompts of each length, one after another. Return the times of each length."""
    lines, uid = [], 0
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    for length in lengths:
        times = []
        requests = random_requests(WARMUP + repeat, (length, length), (1, 1), scheduler.spec.vocab_size, seed + uid)
        for request in requests:
            result, _ = run(scheduler, meter, [request], lambda i: params, first_uid=uid)
            times.append(result.ttft_p50 * 1e3)
            uid += 1
        lines.append(FirstTokenTime(length, float(np.median(times[WARMUP:])), max(times[WARMUP:])))
    return lines


def show(lines: Sequence[FirstTokenTime], title: str) -> None:
    table = Table(title=f"Time to the first token, {title}")
    for name in ("prompt tokens", "p50", "slowest"):
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(f"{line.prompt_tokens:,}", f"{line.p50:.1f} ms", f"{line.slowest:.1f} ms")
    Console().print(table)
