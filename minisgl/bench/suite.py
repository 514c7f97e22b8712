"""``python -m minisgl.bench suite``: the design's workloads on named shapes with random weights, in one table.

Each model is started once; its workloads run one after another on fresh prompts, so that nothing is served from an
earlier one's cache. Beside each number stand what two other engines reached on one H200 and what bytes and FLOPs allow
(4.3 TB/s, 790 TFLOP/s), as far as they were measured or counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from minisgl.bench.arguments import add_json, add_options, parse, write_json
from minisgl.bench.measure import Meter, Result, run
from minisgl.bench.offline import machine
from minisgl.bench.workload import random_asks
from minisgl.core import SamplingParams
from minisgl.engine.followers import start_engine
from minisgl.options.compose import compose, plain_errors
from minisgl.plugin_manager.manager import PluginManager
from minisgl.scheduler import Scheduler
from minisgl.scheduler.build import build_scheduler


@dataclass(frozen=True)
class Workload:
    """``count`` requests; lengths are ranges of tokens. ``unit`` says which of a run's numbers counts."""

    name: str
    count: int
    input: tuple[int, int]
    output: tuple[int, int]
    shared: int = 0
    temperature: float = 0.0
    unit: str = "output tok/s"


OFFLINE = Workload("offline", 256, (100, 1024), (100, 1024), temperature=0.6)
SINGLE = Workload("one request", 1, (128, 128), (512, 512))
DECODE = Workload("64 requests", 64, (1024, 1024), (256, 256))
PREFILL = Workload("prefill", 128, (1024, 1024), (1, 1), unit="prompt tok/s")
SHARED = Workload("shared prefix", 256, (64, 64), (32, 32), shared=2048)
STEADY = Workload("64 decoding", 64, (128, 128), (256, 256), unit="decode tok/s")


class Others(NamedTuple):
    """On one H200, in the workload's unit; None where nobody measured or counted it."""

    mini_sglang: float | None = None
    vllm: float | None = None
    limit: float | None = None


KNOWN: dict[str, dict[Workload, Others]] = {
    "qwen3-0.6b": {
        OFFLINE: Others(21_700, 23_000, 36_300),
        SINGLE: Others(580, 608, 3_280),
        DECODE: Others(14_600, 14_500, 24_900),
        PREFILL: Others(410_000, 410_000, 791_000),
        SHARED: Others(10_000, 13_000),
    },
    "qwen3-14b": {
        OFFLINE: Others(6_060, 6_100, 8_300),
        SINGLE: Others(116, 116, 153),
        DECODE: Others(2_790, 2_780, 3_550),
        PREFILL: Others(24_000, 23_400, 29_400),
        SHARED: Others(2_620, 4_500),
    },
    "qwen3-30b-a3b": {SINGLE: Others(limit=710), STEADY: Others(limit=4_120)},
}


@dataclass(frozen=True)
class Row:
    """One number: ``value`` in ``unit``, with the run it is from (None for the start)."""

    model: str
    workload: str
    unit: str
    value: float
    others: Others
    result: Result | None = None


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m minisgl.bench suite", description=__doc__)
    add_options(parser, "for every model")
    parser.add_argument("--models", nargs="+", default=list(KNOWN), choices=list(KNOWN), help="named shapes")
    parser.add_argument("--only", nargs="+", metavar="WORKLOAD", help="workloads by name")
    parser.add_argument("--seed", type=int, default=0, help="of lengths and tokens (default 0)")
    add_json(parser)
    args = parse(parser, argv)
    names = {workload.name for known in KNOWN.values() for workload in known}
    if unknown := set(args.only or ()) - names:
        parser.error(f"there is no workload {', '.join(sorted(unknown))}: use {', '.join(sorted(names))}")
    rows: list[Row] = []
    where: dict[str, Any] = {}
    with plain_errors("minisgl.bench"):
        for model in args.models:
            found, where = measure(model, args.options, args.only, args.seed)
            rows += found
            show(found, where)
    write_json(args, {"options": args.options, "machine": where, "rows": [asdict(row) for row in rows]})


def measure(
    model: str, options: Sequence[str], only: Sequence[str] | None, seed: int
) -> tuple[list[Row], dict[str, Any]]:
    """Start ``model`` once and run its workloads; the rows, and where it ran."""
    manager = PluginManager.load()
    config = compose(manager, [f"model={model}", "load=dummy", *options])
    begin = time.perf_counter()
    engine = start_engine(config, manager)
    rows = [Row(model, "start", "s", time.perf_counter() - begin, Others())]
    try:
        where = machine(str(engine.device), str(engine.dtype).removeprefix("torch."))
        for number, (workload, others) in enumerate(KNOWN[model].items(), 1):
            if only and workload.name not in only:
                continue
            meter = Meter(engine)
            scheduler = build_scheduler(config, manager, meter)  # a new one: its cache is cold
            result = _run(scheduler, meter, workload, seed + 1000 * number)
            rows.append(Row(model, workload.name, workload.unit, _value(workload, result), others, result))
    finally:
        manager.close()
        engine.close()
    return rows, where


def _run(scheduler: Scheduler, meter: Meter, workload: Workload, seed: int) -> Result:
    """A short run first, in which kernels compile for these shapes; then the workload, with other prompts."""
    short = replace(workload, count=min(workload.count, 8), output=(1, 4), shared=0)
    for first_uid, what in ((0, short), (short.count, workload)):
        asks = random_asks(
            what.count, what.input, what.output, scheduler.spec.vocab_size, seed + first_uid, what.shared
        )
        params = [
            SamplingParams(max_tokens=ask.output, temperature=what.temperature, seed=seed + i, ignore_eos=True)
            for i, ask in enumerate(asks)
        ]
        result, _ = run(scheduler, meter, asks, params.__getitem__, first_uid=first_uid)
    return result


def _value(workload: Workload, result: Result) -> float:
    if workload.unit == "prompt tok/s":
        return result.prompt_tokens / result.seconds
    if workload.unit == "decode tok/s":
        return workload.count / result.inter_token_p50
    return result.output_tokens_per_second


def show(rows: Sequence[Row], where: dict[str, Any]) -> None:
    """One model's rows as a table."""
    table = Table(title=f"{rows[0].model} on {where['device']} ({where['dtype']}, torch {where['torch']})")
    for name in ("", "minisgl", "", "mini-sglang", "vLLM 0.26", "limit", "of it"):
        table.add_column(name, justify="left" if name == "" else "right")
    for row in rows:
        o = row.others
        known = [f"{v:,.0f}" if v else "–" for v in o]
        share = f"{row.value / o.limit:.0%}" if o.limit else "–"
        table.add_row(
            row.workload, f"{row.value:,.1f}" if row.value < 100 else f"{row.value:,.0f}", row.unit, *known, share
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
