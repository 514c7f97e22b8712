"""``python -m minisgl.bench link``: the time of the all-reduce between the GPUs of this machine.

One call does what a decoder layer does twice: sum over ranks, add the residual, RMSNorm. The calls are captured in a
CUDA graph; each rank is a process. The times show up to which size `communicator=nccl` should use which algorithm.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from minisgl.bench.arguments import add_json, write_json
from minisgl.cluster.process import free_port
from minisgl.config import ConfigError
from minisgl.plugin_manager.manager import PluginManager

ALGORITHMS: dict[str, tuple[str, dict[str, int]]] = {
    "NCCL": ("torch", {}),
    "one-shot": ("nccl", {"one_shot_bytes": 16 << 20, "two_shot_bytes": 0}),
    "two-shot": ("nccl", {"one_shot_bytes": 0, "two_shot_bytes": 64 << 20}),
}
ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
CALLS = 20
"""Number of calls in the CUDA graph."""


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m minisgl.bench link", description=__doc__)
    parser.add_argument("--size", type=int, default=torch.cuda.device_count(), help="ranks (default: all GPUs)")
    parser.add_argument("--hidden", type=int, default=5120, help="elements of a row, bfloat16 (default 5120)")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    add_json(parser)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--addresses", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    found = torch.cuda.device_count()
    if not 2 <= args.size <= found:
        parser.error(f"an all-reduce needs at least two ranks and one GPU for each rank; torch finds {found} GPUs")
    if args.rank:
        measure(args)
        return
    args.addresses = [f"127.0.0.1:{free_port()}" for _ in ALGORITHMS]
    arguments = [*argv, "--size", str(args.size), "--addresses", *args.addresses]
    command = [sys.executable, "-c", "import sys; from minisgl.bench.link import main; main(sys.argv[1:])", *arguments]
    others = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(1, args.size)]
    try:
        times = measure(args)
    finally:
        for process in others:
            process.wait(60)
    show(times, args)
    where = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "size": args.size}
    write_json(args, {**where, "hidden": args.hidden, "us": times})


def measure(args: argparse.Namespace) -> dict[str, list[float | None]]:
    """Return the microseconds of a call for each algorithm and number of rows.

    A time is None if the algorithm is not available. Every rank must call this function.
    """
    manager, device = PluginManager.load(), torch.device("cuda", args.rank)
    torch.cuda.set_device(device)
    times: dict[str, list[float | None]] = {}
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream(device)):
        for address, (algorithm, (name, options)) in zip(args.addresses, ALGORITHMS.items(), strict=True):
            config: Any = manager.make("communicator", name)
            for option, value in options.items():
                setattr(config, option, value)
            build = {"rank": args.rank, "size": args.size, "address": address, "device": device}
            try:
                comm = manager.build("communicator", config, **build)
            except ConfigError as error:
                print(f"{algorithm}: {error}", file=sys.stderr)
                times[algorithm] = [None] * len(args.rows)
                continue
            times[algorithm] = [_time_rows(comm, rows, args.hidden, device) for rows in args.rows]
            comm.close()
    return times


def _time_rows(comm: Any, rows: int, hidden: int, device: torch.device) -> float:
    weight = torch.ones(hidden, dtype=torch.bfloat16, device=device)
    residual = torch.zeros(rows, hidden, dtype=torch.bfloat16, device=device)
    x = torch.randn(rows, hidden, device=device).bfloat16()

    def call() -> None:
        comm.all_reduce_norm(x, residual, weight, 1e-6)

    return time_together(call, CALLS)


def time_together(call: Callable[[], Any], calls: int) -> float:
    """Return the median microseconds of a call, measured in a CUDA graph of ``calls`` calls.

    All ranks must call this function; the all-reduce itself keeps them in step.
    """
    call()
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(calls):
            call()
    times = []
    for _ in range(33):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / calls)
    return float(statistics.median(times[3:]))


def show(times: dict[str, list[float | None]], args: argparse.Namespace) -> None:
    print(f"{args.size} x {torch.cuda.get_device_name()}: sum + residual + norm of rows of {args.hidden} bfloat16, µs")
    print("rows".rjust(8) + "".join(algorithm.rjust(12) for algorithm in times))
    for i, rows in enumerate(args.rows):
        cells = ["–" if column[i] is None else f"{column[i]:.1f}" for column in times.values()]
        print(f"{rows:8}" + "".join(cell.rjust(12) for cell in cells))


if __name__ == "__main__":
    main(sys.argv[1:])
