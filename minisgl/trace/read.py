"""Reads a trace file. Accepts a file whose writer was killed, and refuses other versions of the format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from minisgl.core import INTERRUPTED, EngineSpec
from minisgl.trace.events import VERSION, End, Finish, Header, Line, decoder

__all__ = ["Trace", "TraceError", "read"]


class TraceError(ValueError):
    """A file is not a trace, cannot be read or written, or lacks what was asked for. The message says which and why."""


@dataclass(frozen=True)
class Trace:
    """A trace. ``events`` are in the order in which they happened; ``events[i]`` is line i + 2 of the file."""

    name: str
    header: Header
    events: Sequence[Line]

    @property
    def spec(self) -> EngineSpec:
        """Sizes of the engine."""
        return EngineSpec(**self.header.spec)  # type: ignore[arg-type]  # the sizes, not the groups

    @property
    def complete(self) -> bool:
        """Whether the trace was closed. If not, the last events may be missing."""
        return bool(self.events) and isinstance(self.events[-1], End)

    @property
    def interrupted(self) -> int:
        """The number of requests that were open when the run was ended from outside, as by Ctrl-C."""
        return sum(isinstance(event, Finish) and event.error == INTERRUPTED for event in self.events)

    def __iter__(self) -> Iterator[Line]:
        return iter(self.events)


def read(path: str | Path) -> Trace:
    """Return the trace in a file, without a last line that was cut off. Raises `TraceError`."""
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError as error:
        raise TraceError(f"There is no file {path}.") from error
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}.") from error
    partial = lines.pop()  # empty if the last line was written completely
    events: list[Line] = []
    for number, line in enumerate([*lines, partial] if partial and not lines else lines, 1):
        try:
            events.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise TraceError(f"{path}, line {number} is not an event of a trace: {error}") from error
        if number == 1 and isinstance(events[0], Header) and events[0].version != VERSION:
            found = events[0].version
            raise TraceError(f"{path} has trace format {found}; this minisgl reads {VERSION}. Record the run again.")
    if not events or not isinstance(events[0], Header):
        raise TraceError(f"{path} is not a trace: its first line must be a header. Write one with trace={path}.")
    return Trace(Path(path).name, events[0], events[1:])
