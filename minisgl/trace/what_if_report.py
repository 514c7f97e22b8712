"""``python -m minisgl.trace what-if``: how a recorded run went on, and how it would have gone on with other options."""

from __future__ import annotations

import argparse
import math
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
    """What happened from a step on. The lists are in seconds; each token after a request's first has a gap.

    ``computed_tokens`` are the tokens of prefill rows: prompts, and what retracted requests compute again.
    ``first_retraction`` is (step, uid), or None.
    """

    first_token_times: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    retractions: int = 0
    first_retraction: tuple[int, int] | None = None
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
                m.first_retraction = m.first_retraction or (event.step, event.uid)
            case ev.Batch():
                batches[event.step] = event
                if event.step >= at:
                    m.steps += 1
                    m.computed_tokens += event.num_prompt_tokens
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
    """Both futures in words: ``rows`` are (what is counted or timed, as it was, as it would be, measured).

    Counts are exact. Times are simulated in both futures; the last column has those of the record, and no counts.
    """

    future: Future
    rows: list[tuple[str, str, str, str]]
    notes: list[str]
    was: Measures
    would: Measures


def report(trace: Trace, at: int, overrides: Sequence[str], held: Collection[int] = ()) -> Report:
    """Compare the rest of a run from step ``at`` on with what it would be. Raise `TraceError` or `ConfigError`.

    ``held`` are the steps before which the server waited on purpose.
    """
    future = what_if(trace, at, overrides, held)
    arrivals = _arrivals(future.was)
    was = measure(future.was, trace.spec.page_size, at, arrivals)
    real = measure(trace, trace.spec.page_size, at, _arrivals(trace))
    first, started = (0, was.started) if future.restarted else (at, ())
    would = measure(future.events, future.spec.page_size, first, arrivals, started)
    all_three = [was, would, real]
    rows = [
        ("prompt tokens computed", f"{was.computed_tokens:,}", f"{would.computed_tokens:,}", ""),
        ("prompt tokens from the cache", _share(was), _share(would), ""),
        ("steps", str(was.steps), str(would.steps), ""),
        ("retractions", str(was.retractions), str(would.retractions), ""),
    ]
    for name, values in (
        ("time to first token", [m.first_token_times for m in all_three]),
        ("time between tokens", [m.gaps for m in all_three]),
    ):
        rows.append((f"{name}, ms: median", *(_ms(each, 0.5) for each in values)))  # type: ignore[arg-type]
        rows.append((f"{name}, ms: 99 % are shorter", *(_ms(each, 0.99) for each in values)))  # type: ignore[arg-type]
    return Report(future, rows, _notes(future, at), was, would)


def _notes(future: Future, at: int) -> list[str]:
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
    notes = [note]
    if future.same:
        notes.append(f"The run had {' '.join(future.same)} itself.")
    notes.append(f"Counts are exact. Times are simulated in both columns, with one estimate for both: {future.times}.")
    if future.times and future.times.synchronous:
        notes.append("The device computes a step within its launch, as a CPU does, so overlap hides no host time.")
    return notes


def _arrivals(events: Iterable[ev.Line]) -> dict[int, float]:
    return {event.uid: event.t for event in events if isinstance(event, ev.Add)}


def compare(args: argparse.Namespace, out: Console) -> None:
    """Print both futures, and where they part. Raise `TraceError` or `ConfigError`."""
    found = report(read(args.trace), args.at, args.overrides)
    table = Table(box=None, pad_edge=False)
    table.add_column(f"from step {args.at} on")
    table.add_column("as it was", justify="right")
    table.add_column(escape(" ".join(args.overrides) or "the same options"), justify="right")
    table.add_column("measured", justify="right", style="dim")
    for row in found.rows:
        table.add_row(*row)
    out.print(table)
    note, *more = found.notes
    out.print(f"\n{note}", style="yellow" if found.future.misses is not None else None)
    for each in more:
        out.print(each, style="dim")


def _ms(values: list[float], share: float) -> str:
    """Return a quantile in milliseconds, with two digits: an estimate has no more."""
    if not values:
        return "–"
    ms = 1000 * sorted(values)[min(int(share * len(values)), len(values) - 1)]
    digits = max(1 - (math.floor(math.log10(ms)) if ms > 0 else 0), -3)
    return f"{round(ms, digits):.{max(digits, 0)}f}"


def _share(m: Measures) -> str:
    return f"{m.cached_tokens:,} ({100 * m.cached_tokens / m.prompt_tokens:.0f} %)" if m.prompt_tokens else "–"
