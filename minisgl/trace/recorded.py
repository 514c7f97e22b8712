"""What `minisgl.trace.what_if` needs of a record: its requests, and the options with which its run can be repeated."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from minisgl.trace import events as ev
from minisgl.trace.read import Trace, TraceError

__all__ = ["Recorded", "options_of", "requests_of"]

CARRIED = ("page_size", "max_running_requests", "max_prefill_tokens", "overlap", "starvation_steps", "seed")
"""The options of the record that the repetition uses, beside the groups `PARTS`."""
PARTS = ("cache", "scheduler")


@dataclass
class Recorded:
    """A request of the record: when it came, what it gained, and how it ended."""

    added: ev.Add
    place: int
    """The number of its first event in the record."""
    before: tuple[int, int]
    """The numbers of launched and of read steps when it came."""
    output: list[int] = field(default_factory=list)
    end: ev.Finish | None = None
    end_place: int = 1 << 60
    end_before: tuple[int, int] = (1 << 60, 1 << 60)

    @property
    def is_aborted(self) -> bool:
        """Whether something outside of the scheduler ended it, or the record."""
        return self.end is None or self.end.finish_reason in ("abort", "error")


def requests_of(trace: Trace, first: int) -> dict[int, Recorded]:
    """Return the requests of a record, whose first step is ``first``, by uid.

    Raise `TraceError` for a record that can't be repeated.
    """
    found: dict[int, Recorded] = {}
    batches: deque[ev.Batch] = deque()
    launched = read = first
    for place, event in enumerate(trace):
        match event:
            case ev.Now() if place:
                raise TraceError(f"{trace.name} has a gap before step {event.step}: its run can't be repeated.")
            case ev.Add():
                if event.uid in found:
                    raise TraceError(f"{trace.name} uses the uid {event.uid} twice: its run can't be repeated.")
                found[event.uid] = Recorded(event, place, (launched, read))
            case ev.Batch():
                if event.drafts:
                    raise TraceError(
                        f"{trace.name} has draft tokens, and not what its proposer knew: leave out speculation."
                    )
                launched += 1
                batches.append(event)
            case ev.Done():
                read += 1
                for uid, token, gained in zip(batches.popleft().uids, event.tokens, event.gained, strict=True):
                    if gained:
                        found[uid].output.append(token)
            case ev.Finish():
                ended = found[event.uid]
                ended.end, ended.end_place, ended.end_before = event, place, (launched, read)
    return found


def options_of(trace: Trace, chosen: Collection[str] = ()) -> list[str]:
    """Return the options of a record, as on the command line, without the parts of the groups ``chosen``."""
    options = trace.header.options
    words = [f"plugins=[{','.join(each['path'] for each in trace.header.plugins)}]"] if trace.header.plugins else []
    words += [f"{name}={_word(options[name])}" for name in CARRIED if name in options]
    words += [f"num_pages={trace.spec.num_pages}"]
    for group in PARTS:
        if group in chosen:
            continue
        part = dict(options.get(group) or {})
        if not part:
            raise TraceError(f"{trace.name} does not say which {group} it had: its run can't be repeated.")
        words.append(f"{group}={part.pop('type')}")
        words += [f"{group}.{name}={_word(value)}" for name, value in part.items()]
    return words


def _word(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
