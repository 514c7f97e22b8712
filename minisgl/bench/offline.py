"""``python -m minisgl.bench offline``: throughput and latency of a list of requests, without a server.

Prints a table and writes JSON. The report contains the device, the versions, the options and the workload, so that runs
can be compared.
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

from minisgl.bench import synthetic
from minisgl.bench.arguments import add_json, add_options, parse, write_json
from minisgl.bench.measure import Meter, Result, run
from minisgl.bench.transformers_baseline import TransformersResult, run_transformers
from minisgl.bench.workload import SampleRequest, parse_range, random_requests, read_requests
from minisgl.config import ConfigError
from minisgl.core import SamplingParams
from minisgl.engine.build import start_engine
from minisgl.models.resolve import resolve_model
from minisgl.options.compose import compose, plain_errors
from minisgl.plugin_manager.manager import PluginManager
from minisgl.scheduler.build import build_scheduler
from minisgl.tokenizer.tokenizer import Tokenizer
from minisgl.utils.version import __version__


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m minisgl.bench offline", description=__doc__)
    add_options(p, "as for `python -m minisgl`")
    p.add_argument("--requests", type=int, default=64, help="number of requests (default 64)")
    p.add_argument("--input", default="16:512", metavar="LOW:HIGH", help="prompt lengths in tokens (default 16:512)")
    p.add_argument("--output", default="16:256", metavar="LOW:HIGH", help="output lengths in tokens (default 16:256)")
    p.add_argument(
        "--shared",
        type=int,
        default=0,
        metavar="N",
        help="tokens of a common prefix, in addition to --input",
    )
    p.add_argument("--seed", type=int, default=0, help="random seed of lengths and tokens (default 0)")
    p.add_argument("--file", type=Path, help='read requests from JSON lines: {"prompt": …, "max_tokens": n}')
    p.add_argument("--temperature", type=float, default=0.0, help="sampling temperature; 0 (the default) is greedy")
    synthetic.add_arguments(p)
    p.add_argument("--compare", choices=["transformers"], help="also run the requests with transformers; greedy only")
    add_json(p)
    return p


def main(argv: Sequence[str]) -> None:
    args = parse(parser(), argv)
    with plain_errors("minisgl.bench"):
        report = measure(args)
    show(report)
    write_json(args, report)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark. Return the report, which can be written as JSON."""
    if args.compare and args.temperature:
        raise ConfigError("--compare is greedy: leave out --temperature.")
    if args.compare and args.acceptance is not None:
        raise ConfigError("--compare needs right outputs: leave out --acceptance.")
    synthetic.check_arguments(args)
    manager = PluginManager.load()
    config = compose(manager, args.options)
    path = resolve_model(config.model)
    engine = start_engine(config, manager)
    try:
        meter, proposer = Meter(engine), None
        if args.acceptance is not None:
            synthetic.force_acceptance(engine, args.acceptance, args.seed)
            proposer = synthetic.SyntheticProposer(engine.spec, args.drafts)
        adapt = not args.fixed_drafts
        scheduler = build_scheduler(config, manager, meter, proposer=proposer, adapt_drafts=adapt)
        requests = _requests(args, path, engine.spec.vocab_size)

        def params(i: int) -> SamplingParams:
            return SamplingParams(
                max_tokens=requests[i].output_len, temperature=args.temperature, seed=args.seed + i, ignore_eos=True
            )

        warmup = [SampleRequest(requests[0].prompt_ids[:8], 4)]
        run(scheduler, meter, warmup, lambda i: SamplingParams(max_tokens=4, temperature=args.temperature))
        with _bar("minisgl", requests) as bar:
            result, tokens = run(scheduler, meter, requests, params, first_uid=1, on_tokens=bar.update)
        device, dtype = str(engine.device), str(engine.dtype).removeprefix("torch.")
    finally:
        manager.close()
        engine.close()
    reference = None
    if args.compare:
        with _bar("transformers", requests) as bar:
            reference = run_transformers(path, requests, tokens, device, dtype, on_tokens=bar.update)
    return {
        "options": args.options,
        "workload": {k: str(v) for k, v in vars(args).items() if k not in ("options", "json", "compare")},
        "machine": machine(device, dtype),
        "minisgl": result.plain(),
        **({"transformers": reference.plain()} if reference else {}),
    }


def _requests(args: argparse.Namespace, path: Path, vocab_size: int) -> list[SampleRequest]:
    outputs = parse_range(args.output)
    if args.file is not None:
        return read_requests(args.file, Tokenizer.from_dir(path), outputs[1])
    if args.requests < 1:
        raise ConfigError(f"--requests {args.requests}: must be at least 1.")
    return random_requests(args.requests, parse_range(args.input), outputs, vocab_size, args.seed, args.shared)


def _bar(name: str, requests: Sequence[SampleRequest]) -> Any:
    return tqdm(
        total=sum(request.output_len for request in requests),
        desc=name,
        unit="tok",
        dynamic_ncols=True,
        disable=None,
        leave=False,
    )


def machine(device: str, dtype: str) -> dict[str, Any]:
    """Return the names of the device and the versions of the software, for a report."""
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
    """Print the report as a table."""
    m, r = report["machine"], Result(**report["minisgl"])
    console = Console()
    table = Table(title=f"{r.requests} requests on {m['device']} ({m['dtype']}, {m['threads']} threads)")
    table.add_column("")
    table.add_column("minisgl", justify="right")
    other = TransformersResult(**report["transformers"]) if "transformers" in report else None
    if other:
        table.add_column(f"{other.version}, batches of {other.batch}", justify="right")

    def row(name: str, ours: str, theirs: str = "") -> None:
        table.add_row(name, ours, *([theirs] if other else []))

    row(
        "output tokens per second",
        f"{r.output_tokens_per_second:,.0f}",
        f"{other.output_tokens_per_second:,.0f}" if other else "",
    )
    row("seconds", f"{r.seconds:.2f}", f"{other.seconds:.2f}" if other else "")
    row("output tokens", f"{r.output_tokens:,}", f"{other.output_tokens:,}" if other else "")
    row("prompt tokens", f"{r.prompt_tokens:,}")
    row("time to first token, p50 / p99", f"{r.ttft_p50 * 1e3:,.1f} / {r.ttft_p99 * 1e3:,.1f} ms")
    row("inter-token latency, p50 / p99", f"{r.inter_token_p50 * 1e3:,.2f} / {r.inter_token_p99 * 1e3:,.2f} ms")
    row("steps", f"{r.steps:,}")
    row("tokens computed", f"{r.computed_tokens:,}")
    row("cache hit rate", f"{r.cache_hit_rate:.1%}")
    row("retractions", f"{r.retractions:,}")
    row("worst gap", f"{r.worst_gap_tokens:,} tokens")
    if r.draft_tokens:
        row("draft tokens, accepted", f"{r.draft_tokens:,}, {r.accepted_draft_tokens:,} ({r.acceptance_rate:.1%})")
        row("tokens per step of a decoding request", f"{r.tokens_per_step:.2f}")
    console.print(table)
    if other:
        ratio = r.output_tokens_per_second / other.output_tokens_per_second
        console.print(f"{ratio:.2f} times transformers' throughput; {other.same_outputs} of {r.requests} outputs equal")
