"""``python -m minisgl.bench ttft``: time to the first token of one prompt on an idle engine, by the prompt's length.

From the moment the scheduler takes the request to the token on the host. Every prompt is fresh, so nothing of it is in
the cache.
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
from minisgl.bench.workload import random_asks
from minisgl.config import ConfigError
from minisgl.core import SamplingParams
from minisgl.engine.followers import start_engine
from minisgl.options.compose import compose, plain_errors
from minisgl.plugin_manager.manager import PluginManager
from minisgl.scheduler.build import build_scheduler
from minisgl.scheduler.scheduler import Scheduler

LENGTHS = (16, 64, 128, 256, 512, 1000, 2000)
WARM = 3  # prompts of a length before those that count: kernels are loaded, and caches of compilers filled


@dataclass(frozen=True)
class First:
    """Milliseconds to the first token of a prompt of so many tokens."""

    prompt_tokens: int
    p50: float
    slowest: float


def main(argv: Sequence[str]) -> None:
    p = argparse.ArgumentParser(prog="python -m minisgl.bench ttft", description=__doc__)
    add_options(p, "as for `python -m minisgl`")
    p.add_argument(
        "--input", type=int, nargs="+", default=LENGTHS, metavar="N", help=f"tokens of a prompt (default {LENGTHS})"
    )
    p.add_argument("--repeat", type=int, default=15, help="prompts of each length (default 15)")
    p.add_argument("--seed", type=int, default=0, help="of the tokens (default 0)")
    add_json(p)
    args = parse(p, argv)
    with plain_errors("minisgl.bench"):
        if min(args.repeat, *args.input) < 1:
            raise ConfigError("--input and --repeat: at least 1.")
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


def measure(scheduler: Scheduler, meter: Meter, lengths: Sequence[int], repeat: int, seed: int) -> list[First]:
    """``repeat`` prompts of each length, one after another."""
    lines, uid = [], 0
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    for length in lengths:
        took = []
        asks = random_asks(WARM + repeat, (length, length), (1, 1), scheduler.spec.vocab_size, seed + uid)
        for ask in asks:
            result, _ = run(scheduler, meter, [ask], lambda i: params, first_uid=uid)
            took.append(result.ttft_p50 * 1e3)
            uid += 1
        lines.append(First(length, float(np.median(took[WARM:])), max(took[WARM:])))
    return lines


def show(lines: Sequence[First], title: str) -> None:
    table = Table(title=f"Time to the first token, {title}")
    for name in ("prompt tokens", "p50", "slowest"):
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(f"{line.prompt_tokens:,}", f"{line.p50:.1f} ms", f"{line.slowest:.1f} ms")
    Console().print(table)
