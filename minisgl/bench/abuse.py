"""``python -m minisgl.bench abuse``: abuses a server, and measures what its other clients notice.

The benchmark starts a server with the given options, or takes a running one (``--url``). Before, during and after each
abuse, two clients send short requests one after the other, and a third asks for ``/health``. For each abuse, the table
has the server's answers to it, the latency of the other clients' requests and of ``/health``, and what the server has
not given back afterwards: memory, file descriptors, open requests. Each abuse is bounded in number and in time.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from minisgl.bench.abuses.catalogue import ABUSES
from minisgl.bench.abuses.watch import Report, Watched, abuse, warm_up
from minisgl.bench.arguments import add_json, add_options, parse, write_json
from minisgl.testing.serving import Server

OPTIONS = ("model=tutor", "num_pages=4096")
"""The default options of the server. The memory of a larger KV pool would be committed while it is abused."""


def main(argv: Sequence[str]) -> None:
    names = "\n".join(f"  {name}: {entry.summary}" for name, entry in ABUSES.items())
    parser = argparse.ArgumentParser(
        prog="python -m minisgl.bench abuse",
        description=__doc__,
        epilog=f"abuses:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, f"for the server that it starts (default: {' '.join(OPTIONS)})")
    parser.add_argument("--url", help="abuse the server at this address, such as http://127.0.0.1:1919, instead")
    parser.add_argument("--seconds", type=float, default=15.0, help="the longest time of one abuse (default: 15)")
    parser.add_argument("--only", nargs="+", choices=ABUSES, metavar="ABUSE", help="run only these abuses")
    add_json(parser)
    args = parse(parser, argv)
    if args.url and args.options:
        parser.error("options are for the server that the benchmark starts: leave out --url or the options")
    reports = []
    with _server(args) as watched:
        for name in args.only or ABUSES:
            reports.append(abuse(watched, name, args.seconds))
            _print_line(reports[-1])
    show(reports)
    write_json(args, {"seconds": args.seconds, "options": args.options, "abuses": [r._asdict() for r in reports]})


@contextlib.contextmanager
def _server(args: argparse.Namespace) -> Iterator[Watched]:
    if args.url:
        yield Watched(args.url, [], None)
        return
    with Server(*(args.options or OPTIONS), "log_level=warning") as server:
        warm_up(server.url)
        yield Watched(server.url, server.processes, str(server.folder))


def _print_line(report: Report) -> None:
    print(f"{report.name}: {report.seconds:.1f} s, {report.answers}", flush=True)


def show(reports: Sequence[Report]) -> None:
    """Print the table."""
    table = Table(title="abuses, and what other clients notice (ms; memory in MB)")
    columns = ["abuse", "answers", "others p50", "p99", "failed", "/health p99", "memory before", "peak", "after"]
    for name in [*columns, "files", "open"]:
        table.add_column(name, justify="left" if name in ("abuse", "answers") else "right")
    for r in reports:
        table.add_row(r.name, ", ".join(f"{count} × {answer}" for answer, count in r.answers.items()), *_numbers(r))
    console = Console()
    console.width = max(console.width, 150)
    console.print(table)


def _numbers(r: Report) -> list[str]:
    def number(value: Any) -> str:
        return "–" if value is None else f"{value:,.0f}"

    return [
        number(v)
        for v in (
            r.p50_ms,
            r.p99_ms,
            r.failed,
            r.health_p99_ms,
            r.memory_before_mb,
            r.memory_peak_mb,
            r.memory_after_mb,
            r.more_files,
            r.open_requests,
        )
    ]
