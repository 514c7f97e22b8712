"""`trace=run.jsonl`: writes every scheduling event to a file, which `python -m minisgl.trace` reads.

`minisgl.trace.record` makes the events. Prompts and outputs appear in a trace as token ids. Events are buffered and
written a few hundred at a time, and whenever the scheduler becomes idle. If the file can't be written any more, because
the disk is full, the trace ends there and the scheduler goes on.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from minisgl.config import Config, ConfigError
from minisgl.core import EngineSpec
from minisgl.hooks import hookimpl
from minisgl.trace import events as ev
from minisgl.trace.record import EventMaker, header

if TYPE_CHECKING:
    from minisgl.trace.events import Event

log = logging.getLogger(__name__)

BLOCK = 256
"""Number of events that are buffered before they are written."""


@hookimpl
def minisgl_observer(config: Config, spec: EngineSpec) -> Recorder | None:
    if not config.trace:
        return None
    try:
        file = Path(config.trace).expanduser().open("wb", buffering=0)
    except OSError as error:
        raise ConfigError(
            f"trace={config.trace}: {error.strerror}. Name a file to write, in a folder that exists."
        ) from error
    return Recorder(file, header(config, spec))


class _File:
    """A file of whole events. After the first error it takes no more events."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._size = 0  # bytes of whole events

    def write(self, pending: list[Event]) -> None:
        """Write the events, and clear the list. On an error, log it, and end the file after the last whole block."""
        data = memoryview(ev.encoder.encode_lines(pending)) if pending and not self._file.closed else memoryview(b"")
        pending.clear()
        left = data
        try:
            while left:  # a disk that becomes full takes a part of the bytes, and raises at the next write
                left = left[self._file.write(left) :]
        except OSError as error:
            log.error("trace=%s ends here: %s", self._file.name, error.strerror)
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
            with contextlib.suppress(OSError):
                self._file.close()
        else:
            self._size += len(data)

    def close(self, pending: list[Event]) -> None:
        """Write the events, and close the file."""
        self.write(pending)
        with contextlib.suppress(OSError):
            self._file.close()


class Recorder(EventMaker):
    """Puts each event into ``file``, and closes the file at the end."""

    def __init__(self, file: BinaryIO, first: ev.Header):
        super().__init__(self._add)
        self._file, self._events = _File(file), list["Event"]([first])
        # The file is complete even if minisgl_closed is never called: the finalizer runs when this object is deleted or
        # the interpreter exits.
        self._finish = weakref.finalize(self, self._file.close, self._events)

    def _add(self, event: Event) -> None:
        self._events.append(event)
        if len(self._events) >= BLOCK:
            self._file.write(self._events)

    @hookimpl
    def minisgl_pages_counted(self, step: int, free: int, cached: int, evictable: int, retiring: int) -> None:
        super().minisgl_pages_counted(step, free, cached, evictable, retiring)
        if not self.num_open:
            self._file.write(self._events)

    @hookimpl
    def minisgl_closed(self) -> None:
        super().minisgl_closed()
        self._finish()
