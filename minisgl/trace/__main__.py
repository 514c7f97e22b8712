"""``python -m minisgl.trace run.jsonl``: summarizes, checks, converts and draws a recorded run.

The exit status is 1 if a promise was broken, and 2 if a file cannot be read or written or an argument is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from minisgl.config import ConfigError
from minisgl.models.resolve import resolve_model
from minisgl.tokenizer.tokenizer import Tokenizer
from minisgl.trace.check import check
from minisgl.trace.chrome import chrome
from minisgl.trace.draw import gap, pages, staircase, timeline, timelines, tree
from minisgl.trace.draw.tree import Text
from minisgl.trace.history import turns
from minisgl.trace.read import Trace, TraceError, read
from minisgl.trace.summary import show, summarize
from minisgl.trace.view import difference, page

PICTURES = ("timeline", "tree", "pages", "tables", "staircase", "gap")
PICTURES_WITH_OPTION = {"step": ("tree", "pages", "tables"), "steps": ("timeline",), "request": ("staircase",)}
"""Option -> the pictures that use the option."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    p = argparse.ArgumentParser(prog="python -m minisgl.trace", description=(__doc__ or "").split("\n")[0])
    p.add_argument("traces", nargs="+", type=Path, metavar="RUN.jsonl", help="a trace; give two to compare")
    p.add_argument("--html", type=Path, metavar="FILE", help="write a page that replays one run, or two, step by step")
    p.add_argument("--chrome", type=Path, metavar="FILE", help="write a file for chrome://tracing and ui.perfetto.dev")
    p.add_argument("--draw", choices=PICTURES, help="draw an SVG picture; timeline and gap accept two runs")
    p.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="the file for the picture (default: standard output)"
    )
    p.add_argument("--step", type=int, metavar="N", help="the step of tree, pages and tables (default: the middle)")
    p.add_argument("--steps", metavar="A:B", help="the steps that timeline shows: A up to, but not including, B")
    p.add_argument(
        "--text", action="store_true", help="show text instead of token ids in the tree; needs the model's tokenizer"
    )
    p.add_argument("--request", type=int, metavar="UID", help="the request that staircase shows (default: the first)")
    return p


def what_if_parser() -> argparse.ArgumentParser:
    """Return the parser of ``what-if``."""
    p = argparse.ArgumentParser(
        prog="python -m minisgl.trace what-if",
        description="repeats a run up to a step, and goes on with other options, in the simulated engine",
    )
    p.add_argument("trace", type=Path, metavar="RUN.jsonl", help="a trace")
    p.add_argument("--at", type=int, required=True, metavar="N", help="the first step with the other options")
    p.add_argument("overrides", nargs="*", metavar="OPTION=VALUE", help="for example scheduler=mixed")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    out, err = Console(), Console(stderr=True)
    try:
        if words[:1] == ["what-if"]:
            from minisgl.trace.what_if_report import compare  # imports the scheduler and the plugin manager

            compare(what_if_parser().parse_intermixed_args(words[1:]), out)
            return 0
        args = parser().parse_args(words)
        refuse_unused_arguments(args)
        traces = [read(path) for path in args.traces]
        text = decoder(traces[0]) if args.text else None
        drawn = draw(args, traces, text) if args.draw else ""
        if args.html:
            write(args.html, page(traces, text))
        if args.chrome:
            write(args.chrome, json.dumps(chrome(traces[0])))
        if drawn and args.output:
            write(args.output, drawn + "\n")
    except (TraceError, ConfigError) as error:
        err.print(f"minisgl.trace: {escape(str(error))}", style="red", soft_wrap=True, highlight=False)
        return 2
    if drawn:
        if not args.output:
            print(drawn)
        return 0
    return report(traces, out)


def refuse_unused_arguments(args: argparse.Namespace) -> None:
    """Raise `TraceError` if an argument would have no effect, or if there are too many files."""
    if len(args.traces) > 2:
        raise TraceError(f"{len(args.traces)} files were given: give one trace, or two to compare.")
    for name, pictures in PICTURES_WITH_OPTION.items():
        if getattr(args, name) is not None and args.draw not in pictures:
            raise TraceError(f"--{name} needs --draw {' or --draw '.join(pictures)}; without, it has no effect.")
    if args.output and not args.draw:
        raise TraceError("-o needs --draw: it names the file of the picture. --html and --chrome name their own files.")
    if args.text and args.draw != "tree" and not args.html:
        raise TraceError("--text needs --draw tree or --html; without, it has no effect.")
    if len(args.traces) == 2 and args.draw not in (None, "timeline", "gap"):
        raise TraceError(
            f"--draw {args.draw} needs one trace; two were given. Only --draw timeline and --draw gap accept two."
        )
    if len(args.traces) == 2 and args.chrome:
        raise TraceError("--chrome needs one trace; two were given.")


def write(path: Path, text: str) -> None:
    """Write a text file. Raises `TraceError` if the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror}.") from error


def report(traces: Sequence[Trace], out: Console) -> int:
    """Print the summary and the verdict of each run. Return 1 if a run broke a promise, else 0."""
    broken = 0
    for trace in traces:
        show(trace, summarize(trace), out)
        violation = check(trace)
        if violation is not None:
            broken = 1
            out.print(escape(f"\n{violation}"), style="red", soft_wrap=True, highlight=False)
        elif not trace.complete:
            out.print(
                "\nThe trace has no end: its run went on, or its recorder was killed. No promise is broken in it.",
                style="yellow",
            )
        elif open_requests := trace.interrupted:
            were = "1 request was" if open_requests == 1 else f"{open_requests:,} requests were"
            out.print(
                f"\nThe run was interrupted while {were} open. No promise is broken up to that point.",
                style="yellow",
                soft_wrap=True,
            )
        else:
            out.print("\nAll promises that a trace can show were kept.", style="green")
        out.print()
    if len(traces) == 2:
        found = difference(*traces)
        text = (
            f"The runs differ first at step {found['step']}: {found['text']}" if found else "The two runs are the same."
        )
        out.print(escape(text), soft_wrap=True, highlight=False)
    return broken


def decoder(trace: Trace) -> Text:
    """Return a function from token ids to text, for the model of a trace. Raises `TraceError` or `ConfigError`."""
    model = str(trace.header.options.get("model"))
    if model == "simulated":
        raise TraceError(f"{trace.name} is a run of the simulated engine, whose tokens have no text: leave out --text.")
    tokenizer = Tokenizer.from_dir(resolve_model(model))
    if tokenizer is None:
        raise TraceError(f"{model} has no tokenizer: leave out --text.")
    return tokenizer.decode


def draw(args: argparse.Namespace, traces: Sequence[Trace], text: Text | None) -> str:
    """Return the SVG of the picture that the arguments ask for. Raises `TraceError`."""
    trace, named = traces[0], [(each.name, each) for each in traces]
    if args.draw == "timeline":
        steps = _range(args.steps)
        return timelines(named, steps) if len(traces) == 2 else timeline(trace, steps)
    if args.draw == "gap":
        return gap(named)
    if args.draw == "staircase":
        uids = [row.uid for turn, _ in turns(trace) for row in turn.rows]
        if not uids:
            raise TraceError(f"{trace.name} has no steps.")
        return staircase(trace, uids[0] if args.request is None else args.request)
    count = sum(1 for _ in turns(trace))
    step = count // 2 if args.step is None else args.step
    return tree(trace, step, text) if args.draw == "tree" else pages(trace, step, tables=args.draw == "tables")


def _range(text: str | None) -> range | None:
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not (colon and first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise TraceError(f"--steps {text}: write A:B with A smaller than B, for example 0:40.")
    return range(int(first), int(last))


if __name__ == "__main__":
    sys.exit(main())
