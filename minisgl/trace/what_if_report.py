"""``python -m minisgl.trace what-if``: how a recorded run went on, and how it would have gone on with other options."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from minisgl.trace import events as ev
from minisgl.trace.read import Trace, read
from minisgl.trace.what_if import Future, what_if

__all__ = ["Measures", "Report", "compare", "measure", "report"]


@dataclass
class Measures:
    """What happened from a step on. The lists are in seconds; each token after a request's first has a gap."""

    first_token_times: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    retractions: int = 0
    steps: int = 0
    started: set[int] = field(default_factory=set)
    """The requests that had a token before."""


def measure(
    events: Iterable[ev.Line], page_size: int, at: int, arrivals: dict[int, float], started: Collection[int] = ()
) -> Measures:
    """Measure a run from step ``at`` on.

    ``arrivals`` are the times at which requests came, by uid; ``started`` are those that had a token before the events.
    """
    m, last, batches = Measures(), dict[int, float](), dict[int, ev.Batch]()
    for event in events:
        match event:
            case ev.Match() if event.step >= at:
                m.prompt_tokens += event.num_tokens
                m.cached_tokens += len(event.pages) * page_size
            case ev.Retract() if event.step >= at:
                m.retractions += 1
            case ev.Batch():
                batches[event.step] = event
                m.steps += event.step >= at
            case ev.Done():
                for uid, gained in zip(batches.pop(event.step).uids, event.gained, strict=True):
                    if not gained:
                        continue
                    if event.step < at:
                        m.started.add(uid)
                    elif uid in last:
                        m.gaps.append(event.t - last[uid])
                    elif uid not in started:
                        m.first_token_times.append(event.t - arrivals[uid])
                    last[uid] = event.t
    return m


@dataclass
class Report:
    """Both futures in words: ``rows`` are (what is measured, as it was, as it would be)."""

    future: Future
    rows: list[tuple[str, str, str]]
    notes: list[str]


def report(trace: Trace, at: int, overrides: Sequence[str]) -> Report:
    """Compare the rest of a run from step ``at`` on with what it would be. Raise `TraceError` or `ConfigError`."""
    future = what_if(trace, at, overrides)
    arrivals = {event.uid: event.t for event in trace if isinstance(event, ev.Add)}
    was = measure(trace, trace.spec.page_size, at, arrivals)
    first, started = (0, was.started) if future.restarted else (at, ())
    would = measure(future.events, future.spec.page_size, first, arrivals, started)
    rows = [
        ("steps", str(was.steps), str(would.steps)),
        ("time to first token, ms: median", _ms(was.first_token_times, 0.5), _ms(would.first_token_times, 0.5)),
        ("99 %", _ms(was.first_token_times, 0.99), _ms(would.first_token_times, 0.99)),
        ("time between tokens, ms: median", _ms(was.gaps, 0.5), _ms(would.gaps, 0.5)),
        ("99 %", _ms(was.gaps, 0.99), _ms(would.gaps, 0.99)),
        ("prompt tokens from the cache", _share(was), _share(would)),
        ("retractions", str(was.retractions), str(would.retractions)),
    ]
    if future.misses is not None:
        note = (
            f"The run can't be repeated from its trace: step {future.misses} differs. A trace does not say which "
            "requests had a grammar, and policies may read the clock."
        )
    elif future.restarted:
        note = f"The pool is empty at step {at}: the open requests are computed again."
    elif future.departs is None:
        note = "The steps are the same."
    else:
        note = f"The first step with other rows is step {future.departs}."
    return Report(future, rows, [note, "Times of steps that differ from the recorded ones are estimated from these."])


def compare(args: argparse.Namespace, out: Console) -> None:
    """Print both futures, and where they part. Raise `TraceError` or `ConfigError`."""
    found = report(read(args.trace), args.at, args.overrides)
    table = Table(box=None, pad_edge=False)
    table.add_column(f"from step {args.at} on")
    table.add_column("as it was", justify="right")
    table.add_column(escape(" ".join(args.overrides) or "the same options"), justify="right")
    for row in found.rows:
        table.add_row(*row)
    out.print(table)
    note, *more = found.notes
    out.print(f"\n{note}", style="yellow" if found.future.misses is not None else None)
    for each in more:
        out.print(each, style="dim")


def _ms(values: list[float], share: float) -> str:
    return f"{1000 * sorted(values)[min(int(share * len(values)), len(values) - 1)]:.1f}" if values else "–"


def _share(m: Measures) -> str:
    return f"{100 * m.cached_tokens / m.prompt_tokens:.0f} %" if m.prompt_tokens else "–"
