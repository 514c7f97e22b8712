"""What a run came to, in one table: counts that are exact, and times as the scheduler's clock saw them."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from minisgl.trace import events as ev
from minisgl.trace.history import Gap, gaps, turns
from minisgl.trace.read import Trace

__all__ = ["Summary", "show", "summarize"]


@dataclass
class Summary:
    """Counts of one run. Lists are per request (``first``, ``queued``) or per gap (``between``), in seconds."""

    requests: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    prefill: int = 0
    decode: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0
    discarded: int = 0
    most_rows: int = 0
    retractions: int = 0
    evicted: int = 0
    splits: int = 0
    most_pages: int = 0
    worst: Gap | None = None
    seconds: float = 0.0
    queued: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)


def summarize(trace: Trace) -> Summary:
    """Count a trace."""
    s = Summary()
    added: dict[int, float] = {}
    latest: dict[int, float] = {}
    for turn, state in turns(trace):
        s.steps += 1
        s.most_rows = max(s.most_rows, len(turn.rows))
        s.decode += sum(row.count for row in turn.rows if row.decode)
        s.prefill += sum(row.count for row in turn.rows if not row.decode)
        s.most_pages = max(s.most_pages, int((state.owner != -1).sum()))
        s.splits = state.tree.splits
        for event in turn.events:
            match event:
                case ev.Add():
                    added[event.uid] = event.t
                    s.requests += 1
                    s.prompt += len(event.prompt_ids)
                case ev.Finish():
                    s.ends[event.finish_reason] = s.ends.get(event.finish_reason, 0) + 1
                    s.seconds = max(s.seconds, event.t - min(added.values()))
                case ev.Retract():
                    s.retractions += 1
                case ev.Evict():
                    s.evicted += len(event.pages)
                case ev.Match():
                    s.cached += len(event.pages) * trace.spec.page_size
                    if event.uid in added and event.uid not in latest:
                        s.queued.append(turn.t - added[event.uid])
        for row in turn.rows:
            if not row.gained:
                s.discarded += row.lost
            elif turn.read is not None:
                s.output += 1
                if row.uid in latest:
                    s.between.append(turn.read - latest[row.uid])
                else:
                    s.first.append(turn.read - added[row.uid])
                latest[row.uid] = turn.read
    s.worst = max(gaps(trace), key=lambda gap: gap.tokens, default=None)
    return s


def show(trace: Trace, s: Summary, console: Console) -> None:
    """Print it."""
    options = trace.header.options
    named = [f"{key}={as_typed(options[key])}" for key in ("model", "cache", "scheduler", "overlap") if key in options]
    console.print(f"[bold]{escape(trace.name)}[/bold]  [dim]{escape(' '.join(named))}[/dim]", highlight=False)
    table = Table(show_header=False, box=None)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(style="dim")

    def row(name: str, value: str, note: str = "") -> None:
        table.add_row(name, value, note)

    row("requests", f"{s.requests:,}", ", ".join(f"{n} by {reason}" for reason, n in s.ends.items()))
    row("steps", f"{s.steps:,}", f"at most {s.most_rows} rows")
    row("prompt tokens", f"{s.prompt:,}", f"{s.cached:,} from the cache, {s.prefill:,} prefilled")
    row("output tokens", f"{s.output:,}", f"{s.decode:,} decode rows, {s.discarded} tokens discarded")
    spec = trace.spec
    row("pages in use, at most", f"{s.most_pages:,}", f"of {spec.num_pages:,} of {spec.page_size} tokens")
    row("evicted pages", f"{s.evicted:,}", f"{s.splits} splits in the tree")
    row("retractions", f"{s.retractions:,}")
    if s.worst is not None:
        where = f"request {s.worst.uid}, step {s.worst.since} to {s.worst.until}"
        row("worst gap, tokens", f"{s.worst.tokens:,}", where)
    if options.get("model") != "simulated":  # whose clock counts steps
        row("seconds", f"{s.seconds:.3f}")
        for name, values in (
            ("wait for a seat, ms", s.queued),
            ("first token, ms", s.first),
            ("next token, ms", s.between),
        ):
            if values:
                row(name, f"{_at(values, 0.5) * 1e3:.1f}", f"median; 99 %: {_at(values, 0.99) * 1e3:.1f}")
    console.print(table)


def as_typed(value: object) -> str:
    """An option's value as on the command line."""
    value = value["type"] if isinstance(value, dict) else value
    return str(value).lower() if isinstance(value, bool) else str(value)


def _at(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]
