"""A summary of a run: exact counts, and times on the scheduler's clock."""

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
    """Counts and times of one run.

    ``*_tokens`` and ``*_pages`` are counts. The lists are in seconds: ``queue_times`` has one entry for each
    admission of a request before its first token, ``first_token_times`` one for each request that gained a token, and
    ``inter_token_latencies`` one for each token after a request's first: 0 for a token that came with another one.
    The draft tokens are those whose result was read and not discarded.
    """

    requests: int = 0
    finish_reasons: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    discarded_tokens: int = 0
    max_rows: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    retractions: int = 0
    evicted_pages: int = 0
    splits: int = 0
    max_used_pages: int = 0
    worst_gap: Gap | None = None
    seconds: float = 0.0
    queue_times: list[float] = field(default_factory=list)
    first_token_times: list[float] = field(default_factory=list)
    inter_token_latencies: list[float] = field(default_factory=list)


def summarize(trace: Trace) -> Summary:
    """Return the summary of a trace."""
    s = Summary()
    added: dict[int, float] = {}  # uid -> time of its arrival
    latest: dict[int, float] = {}  # uid -> time of its last token
    begun: set[int] = set()  # requests that had a token before the trace began: its time is not known
    for turn, state in turns(trace):
        s.steps += 1
        s.max_rows = max(s.max_rows, len(turn.rows))
        s.decode_tokens += sum(row.count for row in turn.rows if row.decode)
        s.prefill_tokens += sum(row.count for row in turn.rows if not row.decode)
        s.max_used_pages = max(s.max_used_pages, int((state.owner != -1).sum()))
        s.splits = state.tree.splits
        for event in turn.events:
            match event:
                case ev.Now():
                    added |= {req.uid: req.t for req in event.requests}
                    begun |= {req.uid for req in event.requests if req.output}
                case ev.Add():
                    added[event.uid] = event.t
                    s.requests += 1
                    s.prompt_tokens += len(event.prompt_ids)
                case ev.Finish():
                    s.finish_reasons[event.finish_reason] = s.finish_reasons.get(event.finish_reason, 0) + 1
                    s.seconds = max(s.seconds, event.t - min(added.values()))
                case ev.Retract():
                    s.retractions += 1
                case ev.Evict():
                    s.evicted_pages += len(event.pages)
                case ev.Match():
                    s.cached_tokens += len(event.pages) * trace.spec.page_size
                    if event.uid in added and event.uid not in latest and event.uid not in begun:
                        s.queue_times.append(turn.t - added[event.uid])
        for row in turn.rows:
            if not row.kept:
                s.discarded_tokens += row.discarded
            elif turn.read_at is not None:
                s.output_tokens += row.num_tokens
                if row.num_drafts:
                    s.draft_tokens += row.num_drafts
                    s.accepted_draft_tokens += row.num_tokens - row.rounds
                if row.uid in latest:
                    s.inter_token_latencies.append(turn.read_at - latest[row.uid])
                elif row.uid not in begun:
                    s.first_token_times.append(turn.read_at - added[row.uid])
                s.inter_token_latencies += [0.0] * (row.num_tokens - 1)
                latest[row.uid] = turn.read_at
    s.worst_gap = max(gaps(trace), key=lambda gap: gap.num_tokens, default=None)
    return s


def show(trace: Trace, s: Summary, console: Console) -> None:
    """Print a summary as a table."""
    options = trace.header.options
    names = ("model", "cache", "scheduler", "overlap")
    values = [f"{name}={format_option(options[name])}" for name in names if name in options]
    console.print(f"[bold]{escape(trace.name)}[/bold]  [dim]{escape(' '.join(values))}[/dim]", highlight=False)
    table = Table(show_header=False, box=None)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(style="dim")

    def row(name: str, value: str, note: str = "") -> None:
        table.add_row(name, value, note)

    row("requests", f"{s.requests:,}", ", ".join(f"{n} ended by {reason}" for reason, n in s.finish_reasons.items()))
    row("steps", f"{s.steps:,}", f"at most {s.max_rows} rows in a step")
    row("prompt tokens", f"{s.prompt_tokens:,}", f"{s.cached_tokens:,} from the cache, {s.prefill_tokens:,} prefilled")
    note = f"{s.decode_tokens:,} decoded, {s.discarded_tokens} tokens discarded"
    row("output tokens", f"{s.output_tokens:,}", note)
    if s.draft_tokens:
        row("draft tokens", f"{s.draft_tokens:,}", f"{s.accepted_draft_tokens:,} accepted")
    spec = trace.spec
    row("peak pages in use", f"{s.max_used_pages:,}", f"of {spec.num_pages:,} pages with {spec.page_size} tokens each")
    row("evicted pages", f"{s.evicted_pages:,}", f"{s.splits} splits in the radix tree")
    row("retractions", f"{s.retractions:,}")
    if s.worst_gap is not None:
        note = f"request {s.worst_gap.uid}, from step {s.worst_gap.since} to {s.worst_gap.until}"
        row("worst gap, tokens", f"{s.worst_gap.num_tokens:,}", note)
    if options.get("model") != "simulated":  # the clock of a simulated run counts steps
        row("seconds", f"{s.seconds:.3f}")
        for name, times in (
            ("queue time, ms", s.queue_times),
            ("time to first token, ms", s.first_token_times),
            ("inter-token latency, ms", s.inter_token_latencies),
        ):
            if times:
                row(name, f"{_quantile(times, 0.5) * 1e3:.1f}", f"median; 99 %: {_quantile(times, 0.99) * 1e3:.1f}")
    console.print(table)


def format_option(value: object) -> str:
    """Return the value of an option as it is written on the command line."""
    value = value["type"] if isinstance(value, dict) else value
    return str(value).lower() if isinstance(value, bool) else str(value)


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]
