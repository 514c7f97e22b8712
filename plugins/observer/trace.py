"""`trace=run.jsonl`: writes every scheduling event to a file, which `python -m minisgl.trace` reads.

This module turns hook calls into events of `minisgl.trace.events`, and checks nothing. Prompts and outputs appear in a
trace as token ids. Events are buffered and written a few hundred at a time, and whenever the scheduler becomes idle.
If the file can't be written any more, because the disk is full, the trace ends there and the scheduler goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import weakref
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from zlib import crc32

import numpy as np

from minisgl.config import GROUPS, Config, ConfigError
from minisgl.core import I32, EngineSpec, Req, Step, StepResult
from minisgl.hooks import hookimpl
from minisgl.trace import events as ev
from minisgl.utils.version import __version__

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


def header(config: Config, spec: EngineSpec) -> ev.Header:
    """Return the header of a trace: version, sizes, options, plugins.

    Options of the server and of KV events are left out: they change no schedule, and some are secrets.
    """
    left_out = (*GROUPS, "server", "kv_events", "multi_node", "plugins")
    options = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in left_out}
    for group in GROUPS:
        value = getattr(config, group)
        if is_dataclass(value) and not isinstance(value, type):
            options[group] = {"type": _name(value), **asdict(value)}
    plugins = [
        {"path": word, **({"sha256": hashlib.sha256(Path(word).read_bytes()).hexdigest()} if _is_file(word) else {})}
        for word in config.plugins
    ]
    sizes = {f.name: getattr(spec, f.name) for f in fields(spec)}
    return ev.Header(version=ev.VERSION, minisgl=__version__, spec=sizes, options=options, plugins=plugins)


def _name(value: object) -> str:
    """Return the name of a group's option: the module name of a built-in plugin, the class name of any other plugin."""
    kind = type(value)
    package, _, name = kind.__module__.rpartition(".")
    return name if package.startswith("minisgl.plugins.") else kind.__name__


def _is_file(word: str) -> bool:
    return Path(word).is_file()


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


class Recorder:
    """Puts each event into ``file``, and closes the file at the end."""

    def __init__(self, file: BinaryIO, first: ev.Header):
        self._file, self._events = _File(file), list["Event"]([first])
        self._next = 0  # the number of the next step
        self._open = 0  # open requests
        self._planned: Sequence[tuple[int, int]] = ()  # rows of a plan whose step is not launched yet
        self._unread: dict[int, Step] = {}  # launched steps whose result is unread
        self._pool = (-1, -1, -1, -1)  # the last recorded page counts
        # The file is complete even if minisgl_closed is never called: the finalizer runs when this object is deleted or
        # the interpreter exits.
        self._finish = weakref.finalize(self, self._file.close, self._events)

    def _put(self, event: Event) -> None:
        self._events.append(event)
        if len(self._events) >= BLOCK:
            self._file.write(self._events)

    # ---- requests ------------------------------------------------------------------------------------

    @hookimpl
    def minisgl_request_added(self, req: Req, now: float) -> None:
        self._open += 1
        prompt = req.prompt_ids.tolist()
        params = req.params
        self._put(ev.Add(self._next, req.uid, now, prompt, params.max_tokens, params.cache_salt, params.priority))

    @hookimpl
    def minisgl_prefix_matched(self, req: Req, pages: I32, step: int) -> None:
        self._put(ev.Match(step=step, uid=req.uid, num_tokens=len(req), pages=pages.tolist(), priority=req.priority))

    @hookimpl
    def minisgl_request_retracted(self, req: Req, step: int) -> None:
        self._put(ev.Retract(step=step, uid=req.uid))

    @hookimpl
    def minisgl_request_finished(self, req: Req, now: float) -> None:
        self._open -= 1
        self._put(ev.Finish(step=self._next, uid=req.uid, t=now, finish_reason=str(req.finish_reason), error=req.error))

    # ---- pages ---------------------------------------------------------------------------------------

    @hookimpl
    def minisgl_pages_allocated(self, step: int, owners: I32, pages: I32) -> None:
        self._put(ev.Allocate(step=step, owners=owners.tolist(), pages=pages.tolist()))

    @hookimpl
    def minisgl_pages_cached(self, step: int, req: Req, pages: I32, start: int, cached_pages: I32) -> None:
        self._put(
            ev.Cache(step=step, uid=req.uid, start=start, pages=pages.tolist(), cached_pages=cached_pages.tolist())
        )

    @hookimpl
    def minisgl_pages_evicted(self, step: int, pages: I32) -> None:
        self._put(ev.Evict(step=step, pages=pages.tolist()))

    @hookimpl
    def minisgl_pages_freed(self, step: int, owner: int, pages: I32) -> None:
        self._put(ev.Free(step=step, uid=owner, pages=pages.tolist()))

    @hookimpl
    def minisgl_pages_counted(self, step: int, free: int, cached: int, evictable: int, retiring: int) -> None:
        pool = (free, cached, evictable, retiring)
        if pool != self._pool:
            self._pool = pool
            self._put(ev.Pool(step=step, free=free, cached=cached, evictable=evictable, retiring=retiring))
        if not self._open:
            self._file.write(self._events)

    # ---- steps ---------------------------------------------------------------------------------------

    @hookimpl
    def minisgl_batch_planned(self, rows: Sequence[tuple[int, int]]) -> None:
        self._planned = rows

    @hookimpl
    def minisgl_batch_scheduled(self, step: Step, reqs: Sequence[Req], now: float) -> None:
        self._planned = ()
        self._next = step.id + 1
        self._unread[step.id] = step
        for admission in step.admissions:
            self._put(ev.Admit(step=step.id, uid=admission.uid, req_pool_idx=admission.req_pool_idx))
        req_pool_indices, columns, pages = step.page_table_updates
        self._put(
            ev.Batch(
                step=step.id,
                t=now,
                uids=list(map(attrgetter("uid"), reqs)),
                req_pool_indices=step.req_pool_indices.tolist(),
                num_computed_tokens=step.num_computed_tokens.tolist(),
                num_scheduled_tokens=step.num_scheduled_tokens.tolist(),
                num_decode=step.num_decode,
                num_sampled_tokens=step.num_sampled_tokens.tolist(),
                page_table_updates=(req_pool_indices.tolist(), columns.tolist(), pages.tolist()),
                checksum=checksum(step),
                drafts=_drafts(step),
                rounds=step.rounds,
            )
        )

    @hookimpl
    def minisgl_step_finished(self, result: StepResult, reqs: Sequence[Req | None], now: float) -> None:
        self._put(
            ev.Done(
                step=result.id,
                t=now,
                tokens=result.tokens[:, 0].tolist(),
                checksum=checksum(self._unread.pop(result.id)),
                kept=[int(req is not None) for req in reqs] if None in reqs else None,
                runs=None if result.tokens.shape[1] == 1 else _runs(result),
                rounds=None if result.rounds is None else list(map(result.accepted_by_round, range(len(reqs)))),
            )
        )

    @hookimpl
    def minisgl_closed(self) -> None:
        if self._planned:
            self._put(ev.Plan(step=self._next, rows=list(self._planned)))
        for step in self._unread.values():
            self._put(ev.Unread(step=step.id, checksum=checksum(step)))
        self._put(ev.End(step=self._next))
        self._finish()


def _drafts(step: Step) -> list[list[int]]:
    """Return the draft tokens of each verification row."""
    ends = np.cumsum(step.num_scheduled_tokens)
    begins = ends - step.num_scheduled_tokens
    return [step.input_ids[begins[i] + 1 : ends[i]].tolist() for i in step.verification_rows]


def _runs(result: StepResult) -> list[list[int]]:
    """Return the tokens of each row that count."""
    return [run[:n] for run, n in zip(result.tokens.tolist(), result.accepted.tolist(), strict=True)]


def checksum(step: Step) -> int:
    """Return the CRC-32 of a step's arrays.

    A trace has one checksum from the launch and one from the result, which shows whether the launched step was changed.
    """
    total = 0
    for array in (
        step.req_pool_indices,
        step.num_computed_tokens,
        step.num_scheduled_tokens,
        step.num_sampled_tokens,
        step.input_ids,
        *step.page_table_updates,
    ):
        total = crc32(np.ascontiguousarray(array).data, total)
    return total
