"""A trace file, read. Knows the format's versions and what a file looks like whose writer was killed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from minisgl.core import EngineSpec
from minisgl.trace.events import VERSION, End, Header, Line, decoder

__all__ = ["Trace", "TraceError", "read"]


class TraceError(ValueError):
    """A file that is no trace, or can't be read. The message says where and why."""


@dataclass(frozen=True)
class Trace:
    """``events`` in the order in which they happened: event i stands in line i + 2, after the header."""

    name: str
    header: Header
    events: Sequence[Line]

    @property
    def spec(self) -> EngineSpec:
        """The engine's sizes."""
        return EngineSpec(**self.header.spec)

    @property
    def whole(self) -> bool:
        """Whether its writer closed it: otherwise the last events may be missing."""
        return bool(self.events) and isinstance(self.events[-1], End)

    def __iter__(self) -> Iterator[Line]:
        return iter(self.events)


def read(path: str | Path) -> Trace:
    """The trace in a file. A last line that was cut off is left out. Raises `TraceError`."""
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError as error:
        raise TraceError(f"There is no file {path}.") from error
    except OSError as error:
        raise TraceError(f"{path} can't be read: {error.strerror}.") from error
    cut = lines.pop()  # empty, where the last line was written whole
    events: list[Line] = []
    for number, line in enumerate([*lines, cut] if cut and not lines else lines, 1):
        try:
            events.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise TraceError(f"{path}, line {number} is not an event of a trace: {error}") from error
    if not events or not isinstance(events[0], Header):
        raise TraceError(f"{path} is not a trace: its first line must be a header. Write one with trace={path}.")
    if events[0].version != VERSION:
        raise TraceError(f"{path} has format {events[0].version}; this minisgl reads {VERSION}. Record it again.")
    return Trace(Path(path).name, events[0], events[1:])
