"""``python -m minisgl.bench cpu``: a model on this CPU, beside llama.cpp and transformers where they are installed.

All rows have the same shape and random weights. Each measurement runs in a separate process, and the rows take turns,
so that a busy machine slows down all of them. The table has the medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from minisgl.bench import llama_cpp
from minisgl.bench.arguments import add_json, add_options, parse, write_json
from minisgl.bench.measure import Meter, run
from minisgl.bench.offline import machine
from minisgl.bench.shared_prefix import minisgl_server, other_server, tokens_per_second
from minisgl.bench.workload import SampleRequest, random_requests
from minisgl.config import ConfigError
from minisgl.core import SamplingParams
from minisgl.engine.build import start_engine
from minisgl.options.compose import compose, plain_errors
from minisgl.plugin_manager.manager import PluginManager
from minisgl.scheduler.build import build_scheduler
from minisgl.testing.gguf_files import random_gguf

COLUMNS = {
    "decode": "one request: decode tok/s",
    "ttft": "TTFT of 128 tokens, s",
    "prefill": "prefill of 512, tok/s",
    "many": "16 requests, 128 in, 64 out: tok/s",
    "shared": "16 over HTTP, 512 shared, 32 out: tok/s",
    "ready": "ready, s",
    "memory": "peak memory, MB",
}


@dataclass
class Row:
    """One line of the table: ``command`` starts the process that measures it, and ``serve`` a server, if it has one."""

    name: str
    command: list[str]
    serve: Callable[[], AbstractContextManager[str]] | None = None
    found: list[dict[str, float]] = field(default_factory=list)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m minisgl.bench cpu", description=__doc__)
    add_options(p, "as for `python -m minisgl`, for all of its rows")
    p.add_argument("--shape", default="qwen3-0.6b", help="name of a model shape (default qwen3-0.6b)")
    p.add_argument("--rounds", type=int, default=5, help="measurements of each row (default 5)")
    p.add_argument("--rows", nargs="+", default=[], metavar="TEXT", help="only rows whose name contains a TEXT")
    p.add_argument(
        "--llama-python",
        default=sys.executable,
        metavar="PYTHON",
        help="a Python with the package xllamacpp (default: this one, if it has it)",
    )
    p.add_argument("--worker", choices=["minisgl", "transformers"], help=argparse.SUPPRESS)
    add_json(p)
    return p


def main(argv: Sequence[str]) -> None:
    args = parse(parser(), argv)
    with plain_errors("minisgl.bench"):
        if args.worker:
            print(json.dumps({"minisgl": ours, "transformers": transformers}[args.worker](args)), flush=True)
            return
        with tempfile.TemporaryDirectory() as folder:
            report = measure(args, Path(folder))
    show(report)
    write_json(args, report)


def shape_of(name: str) -> dict[str, Any]:
    """Return the content of config.json of a named shape. Raises `ConfigError` if there is none."""
    file = resources.files("minisgl.models") / "shapes" / f"{name}.json"
    if not file.is_file():
        raise ConfigError(f"--shape {name}: there is no shape of this name.")
    shape: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return shape


# ---- the process of a row --------------------------------------------------------------------------------


def workloads(generate: Callable[[int, int, int], tuple[float, float, float]]) -> dict[str, float]:
    """Measure with ``generate(requests, prompt, output)``, which returns TTFT, time of a token, and all seconds."""
    generate(1, 8, 4)
    ttft, token, _ = generate(1, 128, 64)
    prefill, _, _ = generate(1, 512, 2)
    _, _, seconds = generate(16, 128, 64)
    return {"decode": 1 / token, "ttft": ttft, "prefill": 512 / prefill, "many": 16 * 64 / seconds}


def ours(args: argparse.Namespace) -> dict[str, Any]:
    """Measure minisgl with the options of ``args``."""
    manager = PluginManager.load()
    config = compose(manager, args.options)
    engine = start_engine(config, manager)
    try:
        meter = Meter(engine)
        scheduler = build_scheduler(config, manager, meter)
        print("ready", flush=True)
        seeds = iter(range(100))

        def generate(requests: int, prompt: int, output: int) -> tuple[float, float, float]:
            seed, size = next(seeds), engine.spec.vocab_size
            sent: list[SampleRequest] = random_requests(requests, (prompt, prompt), (output, output), size, seed)
            params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
            result, _ = run(scheduler, meter, sent, lambda i: params, first_uid=1000 * seed)
            return result.ttft_p50, result.inter_token_p50, result.seconds

        return {**workloads(generate), "machine": machine(str(engine.device), str(engine.dtype)[6:]), **_instructions()}
    finally:
        manager.close()
        engine.close()


def _instructions() -> dict[str, str]:
    from minisgl.plugins.kernels.ops.cpp.linear import compiled

    library = compiled()
    return {} if library is None else {"instructions": f"{library.target()}, integers: {library.dot_target()}"}


def transformers(args: argparse.Namespace) -> dict[str, Any]:
    """Measure transformers' ``generate`` with random weights in the option ``dtype``."""
    import torch
    import transformers as hf

    options = dict(word.split("=", 1) for word in args.options)
    shape = shape_of(args.shape)
    kind = hf.AutoConfig.for_model(**shape)
    model: Any = hf.AutoModelForCausalLM.from_config(kind, dtype=getattr(torch, options["dtype"])).eval()
    print("ready", flush=True)
    generator = torch.Generator().manual_seed(0)

    def generate(requests: int, prompt: int, output: int) -> tuple[float, float, float]:
        ids = torch.randint(0, shape["vocab_size"], (requests, prompt), generator=generator)
        mask, times = torch.ones_like(ids), []
        for count in (1, output):
            start = time.perf_counter()
            model.generate(ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False)
            times.append(time.perf_counter() - start)
        return times[0], (times[1] - times[0]) / max(1, output - 1), times[1]

    return workloads(generate)


# ---- all rows --------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all rows. Return the report, which can be written as JSON. ``folder`` gets the GGUF files."""
    import torch

    if args.rounds < 1:
        raise ConfigError(f"--rounds {args.rounds}: must be at least 1.")
    rows = [row for row in _rows(args, folder) if not args.rows or any(text in row.name for text in args.rows)]
    if not rows:
        raise ConfigError(f"--rows {' '.join(args.rows)}: no row has a name that contains one of them.")
    for _ in range(args.rounds):
        for row in rows:
            found = _measured(row)
            if row.serve is not None:
                with row.serve() as address:
                    found["shared"] = tokens_per_second(address, shape_of(args.shape)["vocab_size"])
            row.found.append(found)
    named = [found for row in rows for found in row.found if "instructions" in found]
    return {
        "shape": args.shape,
        "machine": named[0]["machine"] if named else machine("cpu", "float32"),
        "instructions": named[0]["instructions"] if named else "",
        "read_gb_per_second": read_bandwidth(),
        "threads": torch.get_num_threads(),
        "rows": {
            row.name: {key: median(found[key] for found in row.found) for key in COLUMNS if key in row.found[0]}
            for row in rows
        },
        "rounds": {row.name: row.found for row in rows},
    }


def _rows(args: argparse.Namespace, folder: Path) -> list[Row]:
    import importlib.util

    import torch

    me = [sys.executable, "-m", "minisgl.bench", "cpu", f"--shape={args.shape}", "--worker"]
    usual = ["device=cpu", "max_seq_len=1024", "max_running_requests=16", *args.options]
    shape, threads = shape_of(args.shape), torch.get_num_threads()

    def own(name: str, options: list[str]) -> Row:
        options = [*options, *usual]
        return Row(name, [*me, "minisgl", *options], partial(minisgl_server, options, threads))

    rows = [
        own(f"minisgl {dtype}", [f"model={args.shape}", "load_format=dummy", f"dtype={dtype}"])
        for dtype in ("bfloat16", "float32")
    ]
    has_llama = subprocess.run([args.llama_python, "-c", "import xllamacpp"], capture_output=True).returncode == 0
    for kind in ("Q8_0", "Q4_0") if importlib.util.find_spec("gguf") else ():
        file = folder / f"{kind}.gguf"
        if not args.rows or any(text in f"minisgl {kind} llama.cpp {kind}" for text in args.rows):
            random_gguf(shape, file, kind)
        rows.append(own(f"minisgl {kind}", [f"model={file}"]))
        if has_llama:
            script = [args.llama_python, llama_cpp.__file__, str(file), str(threads)]
            serve = partial(other_server, [*script, "0"])
            rows.append(Row(f"llama.cpp {kind}", [*script, str(shape["vocab_size"])], serve))
    if importlib.util.find_spec("transformers"):
        dtypes = ("bfloat16", "float32")
        rows += [Row(f"transformers {dtype}", [*me, "transformers", f"dtype={dtype}"]) for dtype in dtypes]
    return rows


def _measured(row: Row) -> dict[str, Any]:
    """Run the process of a row; return its results. Raises `ConfigError` if it fails."""
    start, ready, last, peak = time.perf_counter(), 0.0, "", 0
    process = subprocess.Popen(row.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    for line in process.stdout:
        if line.strip() == "ready":
            ready = time.perf_counter() - start
        last, peak = line, max(peak, _peak_memory(process.pid))
    errors = process.stderr.read()
    if process.wait() != 0:
        raise ConfigError(f"{row.name}: {(errors.strip().splitlines() or ['it failed'])[-1]}")
    return {**json.loads(last), "ready": ready, "memory": peak / 1000}


def _peak_memory(pid: int) -> int:
    """Return the most memory that a process has had, in kB; 0 if it is not known."""
    file = Path(f"/proc/{pid}/status")
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def read_bandwidth() -> float:
    """Return the GB that all threads read per second: the sum of 512 MB, the best of five."""
    import torch

    numbers, best = torch.ones(1 << 27), 0.0
    for _ in range(5):
        start = time.perf_counter()
        numbers.sum()
        best = max(best, numbers.nbytes / (time.perf_counter() - start) / 1e9)
    return best


def show(report: dict[str, Any]) -> None:
    """Print the table."""
    about = report["machine"]
    table = Table(
        title=f"{report['shape']} on {about['device']} ({report['instructions']}; {report['threads']} threads; "
        f"reads {report['read_gb_per_second']:.1f} GB/s)"
    )
    table.add_column("", no_wrap=True)
    for title in COLUMNS.values():
        table.add_column(title, justify="right")
    for name, values in report["rows"].items():
        table.add_row(name, *(f"{values[key]:.3g}" if key in values else "" for key in COLUMNS))
    Console().print(table)
