"""``python -m minisgl.bench suite``: six workloads on named model shapes with random weights, in one table.

Each model is started once. Its workloads run one after another with different prompts, so that no workload finds
prefixes of an earlier one in the cache. The table also shows the numbers of two other engines on one H200, the limit
that bytes and FLOPs allow (4.3 TB/s, 790 TFLOP/s), and the number that minisgl is meant to reach there, as far as these
are known for the weights' dtype. The start is the time that the engine needs, without the import of torch.
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
from minisgl.bench.workload import random_requests
from minisgl.core import SamplingParams
from minisgl.engine.build import start_engine
from minisgl.options.compose import compose, plain_errors
from minisgl.plugin_manager.manager import PluginManager
from minisgl.scheduler import Scheduler
from minisgl.scheduler.build import build_scheduler


@dataclass(frozen=True)
class Workload:
    """A workload of ``count`` requests.

    ``input`` and ``output`` are ranges of lengths in tokens; ``shared`` is the length of a common prefix. ``unit`` is
    the unit of the number that the table shows.
    """

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


class Comparison(NamedTuple):
    """Numbers of other engines, the limit and our goal, on one H200, in the unit of the workload. None: not known."""

    mini_sglang: float | None = None
    vllm: float | None = None
    limit: float | None = None
    goal: float | None = None


KNOWN: dict[str, dict[Workload, Comparison]] = {
    "qwen3-0.6b": {
        OFFLINE: Comparison(21_700, 23_000, 36_300, 29_000),
        SINGLE: Comparison(580, 608, 3_280, 1_600),
        DECODE: Comparison(14_600, 14_500, 24_900, 20_000),
        PREFILL: Comparison(410_000, 410_000, 791_000, 560_000),
        SHARED: Comparison(10_000, 13_000),
    },
    "qwen3-14b": {
        OFFLINE: Comparison(6_060, 6_100, 8_300),
        SINGLE: Comparison(116, 116, 153),
        DECODE: Comparison(2_790, 2_780, 3_550),
        PREFILL: Comparison(24_000, 23_400, 29_400),
        SHARED: Comparison(2_620, 4_500),
    },
    "qwen3-30b-a3b": {
        OFFLINE: Comparison(vllm=6_103, limit=8_150, goal=7_000),
        SINGLE: Comparison(vllm=242, limit=710, goal=420),
        DECODE: Comparison(vllm=2_880, limit=3_690, goal=3_400),
        PREFILL: Comparison(vllm=72_900, limit=135_000, goal=90_000),
        STEADY: Comparison(limit=4_120),
    },
    "gpt-oss-20b": {
        SINGLE: Comparison(limit=590),
        DECODE: Comparison(limit=5_220),
        PREFILL: Comparison(limit=108_000),
        SHARED: Comparison(limit=14_400),
        STEADY: Comparison(limit=6_670),
    },
    "qwen3.5-35b-a3b": {
        SINGLE: Comparison(limit=699),
        DECODE: Comparison(limit=3_540),
        PREFILL: Comparison(limit=132_000),
        SHARED: Comparison(limit=8_610),
        STEADY: Comparison(limit=4_020),
    },
}

KNOWN_FP8: dict[str, dict[Workload, Comparison]] = {
    "qwen3-14b": {
        SINGLE: Comparison(limit=290, goal=230),
        DECODE: Comparison(goal=3_900),
        PREFILL: Comparison(goal=34_000),
        SHARED: Comparison(goal=7_500),
    },
}
"""The same with ``quantize=fp8``. The workloads of a model are those of `KNOWN`."""


def comparison_of(model: str, workload: Workload, quantize: str) -> Comparison:
    """Return what is known of a workload with the value ``quantize`` of the option of this name."""
    if quantize != "fp8":
        return KNOWN[model][workload]
    return KNOWN_FP8.get(model, {}).get(workload, Comparison())


@dataclass(frozen=True)
class Row:
    """One number of the table: ``value`` in ``unit``. ``result`` is None for the row of the start time."""

    model: str
    workload: str
    unit: str
    value: float
    comparison: Comparison
    result: Result | None = None


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m minisgl.bench suite", description=__doc__)
    add_options(parser, "for every model")
    parser.add_argument("--models", nargs="+", default=list(KNOWN), choices=list(KNOWN), help="named model shapes")
    parser.add_argument("--only", nargs="+", metavar="WORKLOAD", help="run only these workloads")
    parser.add_argument("--seed", type=int, default=0, help="random seed of lengths and tokens (default 0)")
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
    """Start ``model`` once and run its workloads. Return the rows, and the description of the machine."""
    manager = PluginManager.load()
    config = compose(manager, [f"model={model}", "load_format=dummy", *options])
    begin = time.perf_counter()
    engine = start_engine(config, manager)
    rows = [Row(model, "start", "s", time.perf_counter() - begin, Comparison())]
    try:
        where = machine(str(engine.device), str(engine.dtype).removeprefix("torch."))
        for number, workload in enumerate(KNOWN[model], 1):
            if only and workload.name not in only:
                continue
            meter = Meter(engine)
            scheduler = build_scheduler(config, manager, meter)  # a new scheduler, whose cache is empty
            result = _run(scheduler, meter, workload, seed + 1000 * number)
            comparison = comparison_of(model, workload, config.quantize)
            rows.append(Row(model, workload.name, workload.unit, _value(workload, result), comparison, result))
    finally:
        manager.close()
        engine.close()
    return rows, where


def _run(scheduler: Scheduler, meter: Meter, workload: Workload, seed: int) -> Result:
    """Run a workload, after a short run with other prompts in which kernels are compiled for these shapes."""
    short = replace(workload, count=min(workload.count, 8), output=(1, 4), shared=0)
    for first_uid, each in ((0, short), (short.count, workload)):
        requests = random_requests(
            each.count, each.input, each.output, scheduler.spec.vocab_size, seed + first_uid, each.shared
        )
        params = [
            SamplingParams(max_tokens=request.output_len, temperature=each.temperature, seed=seed + i, ignore_eos=True)
            for i, request in enumerate(requests)
        ]
        result, _ = run(scheduler, meter, requests, params.__getitem__, first_uid=first_uid)
    return result


def _value(workload: Workload, result: Result) -> float:
    if workload.unit == "prompt tok/s":
        return result.prompt_tokens / result.seconds
    if workload.unit == "decode tok/s":
        return workload.count / result.inter_token_p50
    return result.output_tokens_per_second


def show(rows: Sequence[Row], where: dict[str, Any]) -> None:
    """Print the rows of one model as a table."""
    table = Table(title=f"{rows[0].model} on {where['device']} ({where['dtype']}, torch {where['torch']})")
    for name in ("", "minisgl", "", "mini-sglang", "vLLM 0.26", "limit", "goal", "of limit"):
        table.add_column(name, justify="left" if name == "" else "right")
    for row in rows:
        o = row.comparison
        known = [f"{v:,.0f}" if v else "–" for v in o]
        share = f"{row.value / o.limit:.0%}" if o.limit else "–"
        table.add_row(
            row.workload, f"{row.value:,.1f}" if row.value < 100 else f"{row.value:,.0f}", row.unit, *known, share
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
