"""``python -m minisgl.bench offline``: a list of requests through engine and scheduler, without a server.

Prints a table and writes JSON. What a run was (device, versions, options, workload) stands beside its numbers, so that
one run can be compared with another.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from minisgl.bench.arguments import add_json, add_options, parse, write_json
from minisgl.bench.measure import Meter, Result, run
from minisgl.bench.transformers_baseline import Reference, run_transformers
from minisgl.bench.workload import Ask, parse_range, random_asks, read_asks
from minisgl.config import ConfigError
from minisgl.core import SamplingParams
from minisgl.engine.followers import start_engine
from minisgl.models.resolve import resolve_model
from minisgl.options.compose import compose, plain_errors
from minisgl.plugin_manager.manager import PluginManager
from minisgl.scheduler.build import build_scheduler
from minisgl.tokenizer.tokenizer import Tokenizer
from minisgl.utils.version import __version__


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m minisgl.bench offline", description=__doc__)
    add_options(p, "as for `python -m minisgl`")
    p.add_argument("--requests", type=int, default=64, help="how many (default 64)")
    p.add_argument("--input", default="16:512", metavar="LOW:HIGH", help="prompt tokens (default 16:512)")
    p.add_argument("--output", default="16:256", metavar="LOW:HIGH", help="tokens to generate (default 16:256)")
    p.add_argument("--shared", type=int, default=0, metavar="N", help="tokens that all prompts begin with, on top")
    p.add_argument("--seed", type=int, default=0, help="of lengths and tokens (default 0)")
    p.add_argument("--file", type=Path, help='requests instead: a line each, {"prompt": …, "max_tokens": n}')
    p.add_argument("--temperature", type=float, default=0.0, help="0 (the default) is greedy")
    p.add_argument("--compare", choices=["transformers"], help="run the same requests there too; greedy only")
    add_json(p)
    return p


def main(argv: Sequence[str]) -> None:
    args = parse(parser(), argv)
    with plain_errors("minisgl.bench"):
        report = measure(args)
    show(report)
    write_json(args, report)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run what the arguments ask for; a report that JSON can hold."""
    if args.compare and args.temperature:
        raise ConfigError("--compare runs greedily: leave --temperature out.")
    manager = PluginManager.load()
    config = compose(manager, args.options)
    path = resolve_model(config.model)
    engine = start_engine(config, manager)
    try:
        meter = Meter(engine)
        scheduler = build_scheduler(config, manager, meter)
        asks = _asks(args, path, engine.spec.vocab_size)

        def params(i: int) -> SamplingParams:
            ask = asks[i]
            return SamplingParams(
                max_tokens=ask.output, temperature=args.temperature, seed=args.seed + i, ignore_eos=True
            )

        warm = [Ask(asks[0].prompt[:8], 4)]
        run(scheduler, meter, warm, lambda i: SamplingParams(max_tokens=4, temperature=args.temperature))
        with _bar("minisgl", asks) as bar:
            result, tokens = run(scheduler, meter, asks, params, first_uid=1, seen=bar.update)
        device, dtype = str(engine.device), str(engine.dtype).removeprefix("torch.")
    finally:
        manager.close()
        engine.close()
    reference = None
    if args.compare:
        with _bar("transformers", asks) as bar:
            reference = run_transformers(path, asks, tokens, device, dtype, seen=bar.update)
    return {
        "options": args.options,
        "workload": {k: str(v) for k, v in vars(args).items() if k not in ("options", "json", "compare")},
        "machine": machine(device, dtype),
        "minisgl": result.plain(),
        **({"transformers": reference.plain()} if reference else {}),
    }


def _asks(args: argparse.Namespace, path: Path, vocab_size: int) -> list[Ask]:
    outputs = parse_range(args.output)
    if args.file is not None:
        return read_asks(args.file, Tokenizer.from_dir(path), outputs[1])
    if args.requests < 1:
        raise ConfigError(f"--requests {args.requests}: at least 1.")
    return random_asks(args.requests, parse_range(args.input), outputs, vocab_size, args.seed, args.shared)


def _bar(name: str, asks: Sequence[Ask]) -> Any:
    return tqdm(
        total=sum(ask.output for ask in asks), desc=name, unit="tok", dynamic_ncols=True, disable=None, leave=False
    )


def machine(device: str, dtype: str) -> dict[str, Any]:
    """Where it ran."""
    import torch

    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else _cpu_name()
    return {
        "device": name,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "minisgl": __version__,
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def show(report: dict[str, Any]) -> None:
    """The report as a table."""
    m, r = report["machine"], Result(**report["minisgl"])
    console = Console()
    table = Table(title=f"{r.requests} requests on {m['device']} ({m['dtype']}, {m['threads']} threads)")
    table.add_column("")
    table.add_column("minisgl", justify="right")
    other = Reference(**report["transformers"]) if "transformers" in report else None
    if other:
        table.add_column(f"{other.version}, batches of {other.batch}", justify="right")

    def row(name: str, ours: str, theirs: str = "") -> None:
        table.add_row(name, ours, *([theirs] if other else []))

    row(
        "output tokens a second",
        f"{r.output_tokens_per_second:,.0f}",
        f"{other.output_tokens_per_second:,.0f}" if other else "",
    )
    row("seconds", f"{r.seconds:.2f}", f"{other.seconds:.2f}" if other else "")
    row("output tokens", f"{r.output_tokens:,}", f"{other.output_tokens:,}" if other else "")
    row("prompt tokens", f"{r.prompt_tokens:,}")
    row("time to first token, p50 / p99", f"{r.ttft_p50 * 1e3:,.1f} / {r.ttft_p99 * 1e3:,.1f} ms")
    row("between tokens, p50 / p99", f"{r.inter_token_p50 * 1e3:,.2f} / {r.inter_token_p99 * 1e3:,.2f} ms")
    row("steps", f"{r.steps:,}")
    row("tokens computed", f"{r.computed_tokens:,}")
    row("cache hit rate", f"{r.cache_hit_rate:.1%}")
    row("retractions", f"{r.retractions:,}")
    row("worst gap", f"{r.worst_gap_tokens:,} tokens")
    console.print(table)
    if other:
        ratio = r.output_tokens_per_second / other.output_tokens_per_second
        console.print(f"{ratio:.2f} times transformers' throughput; {other.same_outputs} of {r.requests} outputs equal")
