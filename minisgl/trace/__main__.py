"""``python -m minisgl.trace run.jsonl``: checks a trace against the promises, sums it up, converts and draws it.

Exits with 1 where a promise was broken, and with 2 where a file can't be read or written.
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
OF_PICTURES = {"step": ("tree", "pages", "tables"), "steps": ("timeline",), "request": ("staircase",)}
"""An option of pictures, and of which: nothing else looks at it."""


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    p = argparse.ArgumentParser(prog="python -m minisgl.trace", description=(__doc__ or "").split("\n")[0])
    p.add_argument("traces", nargs="+", type=Path, metavar="RUN.jsonl", help="written with trace=RUN.jsonl; one or two")
    p.add_argument("--html", type=Path, metavar="FILE", help="a page that scrubs through the run, or through two")
    p.add_argument("--chrome", type=Path, metavar="FILE", help="for chrome://tracing and ui.perfetto.dev")
    p.add_argument("--draw", choices=PICTURES, help="an SVG picture; timeline and gap take two runs as well")
    p.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="where the picture goes (default: standard output)"
    )
    p.add_argument("--step", type=int, metavar="N", help="of tree, pages and tables (default: the one in the middle)")
    p.add_argument("--steps", metavar="A:B", help="of the timeline: from A up to, not including, B")
    p.add_argument(
        "--text", action="store_true", help="let the tree say what its tokens say: needs the model's tokenizer"
    )
    p.add_argument("--request", type=int, metavar="UID", help="of the staircase (default: the first)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    args = parser().parse_args(argv)
    out, err = Console(), Console(stderr=True)
    try:
        refuse_idle(args)
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


def refuse_idle(args: argparse.Namespace) -> None:
    """Raise `TraceError` for what would be given and not looked at."""
    if len(args.traces) > 2:
        raise TraceError(f"{len(args.traces)} files were given: one run can be looked at, or two side by side.")
    for name, pictures in OF_PICTURES.items():
        if getattr(args, name) is not None and args.draw not in pictures:
            raise TraceError(f"--{name} goes with --draw {' or --draw '.join(pictures)}, and does nothing without.")
    if args.output and not args.draw:
        raise TraceError(
            "-o goes with --draw, and says where its picture goes; --html and --chrome name their own file."
        )
    if args.text and args.draw != "tree" and not args.html:
        raise TraceError("--text goes with --draw tree or --html, and does nothing without.")
    if len(args.traces) == 2 and args.draw not in (None, "timeline", "gap"):
        raise TraceError(
            f"--draw {args.draw} is of one run; two were given. Two go with --draw timeline or --draw gap."
        )
    if len(args.traces) == 2 and args.chrome:
        raise TraceError("--chrome is of one run; two were given.")


def write(path: Path, text: str) -> None:
    """Raises `TraceError` where that can't be."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TraceError(f"{path} can't be written: {error.strerror}.") from error


def report(traces: Sequence[Trace], out: Console) -> int:
    """Print what each run came to and whether it kept the promises; 1 where one did not."""
    broken = 0
    for trace in traces:
        show(trace, summarize(trace), out)
        violation = check(trace)
        if violation is not None:
            broken = 1
            out.print(escape(f"\n{violation}"), style="red", soft_wrap=True, highlight=False)
        elif not trace.whole:
            out.print("\nNo promise is broken as far as the trace goes: its writer was killed.", style="yellow")
        else:
            out.print("\nEvery promise that a trace can show was kept.", style="green")
        out.print()
    if len(traces) == 2:
        found = difference(*traces)
        text = "The two runs are the same." if found is None else f"They differ first at step {found['step']}:"
        out.print(escape(text if found is None else f"{text} {found['text']}"), soft_wrap=True, highlight=False)
    return broken


def decoder(trace: Trace) -> Text:
    """How to read a trace's tokens. Raises `TraceError` or `ConfigError`."""
    model = str(trace.header.options.get("model"))
    if model == "simulated":
        raise TraceError(f"{trace.name} is of the simulated engine, whose tokens say nothing: leave --text out.")
    tokenizer = Tokenizer.from_dir(resolve_model(model))
    if tokenizer is None:
        raise TraceError(f"{model} has no tokenizer: leave --text out.")
    return tokenizer.decode


def draw(args: argparse.Namespace, traces: Sequence[Trace], text: Text | None) -> str:
    """The picture that the arguments ask for. Raises `TraceError`."""
    trace, named = traces[0], [(each.name, each) for each in traces]
    if args.draw == "timeline":
        steps = _range(args.steps)
        return timelines(named, steps) if len(traces) == 2 else timeline(trace, steps)
    if args.draw == "gap":
        return gap(named)
    if args.draw == "staircase":
        uids = [row.uid for turn, _ in turns(trace) for row in turn.rows]
        if not uids:
            raise TraceError(f"{trace.name} has no step.")
        return staircase(trace, uids[0] if args.request is None else args.request)
    count = sum(1 for _ in turns(trace))
    step = count // 2 if args.step is None else args.step
    return tree(trace, step, text) if args.draw == "tree" else pages(trace, step, tables=args.draw == "tables")


def _range(text: str | None) -> range | None:
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not (colon and first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise TraceError(f"--steps {text}: write it as A:B, with A smaller than B, as in 0:40.")
    return range(int(first), int(last))


if __name__ == "__main__":
    sys.exit(main())
