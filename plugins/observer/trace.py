"""`trace=run.jsonl`: writes down everything a scheduler does, event by event, for `python -m minisgl.trace` to read.

Knows the hooks and the format of `minisgl.trace.events`, and judges nothing. Prompts and answers stand in a trace as
token ids. Events are collected and written some hundred at a time, and whenever the scheduler has nothing left to do.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from zlib import crc32

import numpy as np

from minisgl.config import GROUPS, Config, ConfigError
from minisgl.core import I32, EngineSpec, Req, Step, StepResult
from minisgl.hooks import hookimpl
from minisgl.trace import events as ev
from minisgl.utils.version import __version__

if TYPE_CHECKING:
    from minisgl.trace.events import Event

BLOCK = 256
"""Events that are collected before they are written."""


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
    """What a reader must know of the run. The server's options stay out: one of them is a key."""
    options = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in (*GROUPS, "server", "plugins")}
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
    """What the option is called: a plugin that ships is named as its file, another as its class."""
    kind = type(value)
    package, _, name = kind.__module__.rpartition(".")
    return name if package.startswith("minisgl.plugins.") else kind.__name__


def _is_file(word: str) -> bool:
    return Path(word).is_file()


class Recorder:
    """Writes each event to ``file``, which it closes at the end."""

    def __init__(self, file: BinaryIO, first: ev.Header):
        self._events: list[Event] = [first]
        self._next = 0  # the step that would be built now
        self._open = 0
        self._planned: Sequence[tuple[int, int]] = ()
        self._unread: dict[int, Step] = {}
        self._pool = (-1, -1, -1, -1)
        # Also where nobody says that the scheduler ended: when this object goes, or the interpreter.
        self._finish = weakref.finalize(self, _close, file, self._events)
        self._file = file

    def _put(self, event: Event) -> None:
        self._events.append(event)
        if len(self._events) >= BLOCK:
            _write(self._file, self._events)

    # ---- requests ------------------------------------------------------------------------------------

    @hookimpl
    def minisgl_request_added(self, req: Req, now: float) -> None:
        self._open += 1
        prompt = req.prompt_ids.tolist()
        self._put(ev.Add(step=self._next, uid=req.uid, t=now, prompt_ids=prompt, max_tokens=req.params.max_tokens))

    @hookimpl
    def minisgl_prefix_matched(self, req: Req, pages: I32, step: int) -> None:
        self._put(ev.Match(step=step, uid=req.uid, tokens=len(req), pages=pages.tolist()))

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
            _write(self._file, self._events)

    # ---- steps ---------------------------------------------------------------------------------------

    @hookimpl
    def minisgl_batch_planned(self, rows: Sequence[tuple[int, int]]) -> None:
        self._planned = rows

    @hookimpl
    def minisgl_batch_scheduled(self, step: Step, reqs: Sequence[Req], now: float) -> None:
        self._planned = ()
        self._next = step.id + 1
        self._unread[step.id] = step
        for seat in step.admissions:
            self._put(ev.Admit(step=step.id, uid=seat.uid, req_pool_idx=seat.req_pool_idx))
        slots, columns, pages = step.page_table_updates
        self._put(
            ev.Batch(
                step=step.id,
                t=now,
                uids=list(map(attrgetter("uid"), reqs)),
                req_pool_indices=step.req_pool_indices.tolist(),
                num_computed_tokens=step.num_computed_tokens.tolist(),
                num_scheduled_tokens=step.num_scheduled_tokens.tolist(),
                num_decode=step.num_decode,
                sample=step.sample.view(np.int8).tolist(),
                page_table_updates=(slots.tolist(), columns.tolist(), pages.tolist()),
                sums=checksum(step),
            )
        )

    @hookimpl
    def minisgl_step_finished(self, result: StepResult, reqs: Sequence[Req | None], now: float) -> None:
        self._put(
            ev.Done(
                step=result.id,
                t=now,
                tokens=result.tokens[:, 0].tolist(),
                sums=checksum(self._unread.pop(result.id)),
                gained=[int(req is not None) for req in reqs] if None in reqs else None,
            )
        )

    @hookimpl
    def minisgl_closed(self) -> None:
        if self._planned:
            self._put(ev.Plan(step=self._next, rows=list(self._planned)))
        for step in self._unread.values():
            self._put(ev.Unread(step=step.id, sums=checksum(step)))
        self._put(ev.End(step=self._next))
        self._finish()


def checksum(step: Step) -> int:
    """Of a step's arrays as they are now: that a launched step does not change is for the reader to see."""
    total = 0
    for array in (
        step.req_pool_indices,
        step.num_computed_tokens,
        step.num_scheduled_tokens,
        step.sample,
        step.input_ids,
        *step.page_table_updates,
    ):
        total = crc32(np.ascontiguousarray(array).data, total)
    return total


def _write(file: BinaryIO, pending: list[Any]) -> None:
    if pending:
        file.write(ev.encoder.encode_lines(pending))
        pending.clear()


def _close(file: BinaryIO, pending: list[Any]) -> None:
    with file:
        _write(file, pending)
