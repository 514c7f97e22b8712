"""``python -m minisgl.bench online``: throughput and latency of any OpenAI-compatible server, over HTTP.

Requests arrive at random times (Poisson, or in bursts), all at once, or from a closed loop of clients. A list of rates
or of numbers of clients is a sweep. The report has the field names of ``vllm bench serve``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from minisgl.bench.arguments import add_json, parse, writable
from minisgl.bench.loadgen.measure import measure
from minisgl.bench.loadgen.options import OnlineOptions, ReplayOptions, describe, read_options
from minisgl.bench.loadgen.plot import draw
from minisgl.bench.loadgen.report import show, write_report
from minisgl.options.compose import plain_errors

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells expect it."""


def main(argv: Sequence[str]) -> None:
    run("online", __doc__ or "", OnlineOptions, argv)


def run(name: str, doc: str, schema: type[OnlineOptions] | type[ReplayOptions], argv: Sequence[str]) -> None:
    """Run ``bench online`` or ``bench replay``: read the options, measure, and write the results."""
    parser = argparse.ArgumentParser(
        prog=f"python -m minisgl.bench {name}",
        description=doc,
        epilog=describe(schema),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("options", nargs="*", metavar="key=value", help="the options below")
    add_json(parser)
    parser.add_argument("--plot", type=writable, metavar="FILE", help="draw the results as an SVG file")
    args = parse(parser, argv)
    with plain_errors("minisgl.bench"):
        options = read_options(schema, args.options)
        try:
            results = measure(options)
        except KeyboardInterrupt:
            print("minisgl.bench: stopped before the first measurement.", file=sys.stderr)
            raise SystemExit(INTERRUPTED) from None
    show(results.reports, results.title)
    write_report(args.json, results.reports, results.sweep)
    if args.plot is not None:
        args.plot.write_text(draw(results) + "\n", encoding="utf-8")
    if results.interrupted:
        raise SystemExit(INTERRUPTED)
    if not any(report["completed"] for report in results.reports):
        raise SystemExit(1)
