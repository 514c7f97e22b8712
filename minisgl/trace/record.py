"""Turns what an observer is told into the events of a trace, one object for each. It writes and checks nothing.

`minisgl.plugins.observer.trace` writes the events to a file, and `minisgl.plugins.live` sends them to a web page.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from minisgl.config import GROUPS, Config
from minisgl.core import I32, EngineSpec, Req, Step, StepResult
from minisgl.hooks import hookimpl
from minisgl.trace import events as ev
from minisgl.utils.version import __version__

__all__ = ["EventMaker", "batch_event", "header"]


def header(config: Config, spec: EngineSpec) -> ev.Header:
    """Return the header of a trace: version, sizes, options, plugins.

    Options of the server, of KV events and of the live view are left out: they change no schedule, and some are
    secrets.
    """
    left_out = (*GROUPS, "server", "kv_events", "multi_node", "plugins")
    options = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in left_out}
    for group in GROUPS:
        if group == "live":
            continue
        value = getattr(config, group)
        if is_dataclass(value) and not isinstance(value, type):
            options[group] = {"type": _name(value), **asdict(value)}
    plugins = [
        {"path": word, **({"sha256": hashlib.sha256(Path(word).read_bytes()).hexdigest()} if _is_file(word) else {})}
        for word in config.plugins
    ]
    sizes = {f.name: int(getattr(spec, f.name)) for f in fields(spec) if f.name != "groups"}  # a trace knows one group
    return ev.Header(version=ev.VERSION, minisgl=__version__, spec=sizes, options=options, plugins=plugins)


def _name(value: object) -> str:
    """Return the name of a group's option: the module name of a built-in plugin, the class name of any other plugin."""
    kind = type(value)
    package, _, name = kind.__module__.rpartition(".")
    return name if package.startswith("minisgl.plugins.") else kind.__name__


def _is_file(word: str) -> bool:
    return Path(word).is_file()


class EventMaker:
    """An observer that makes an event of each call, and passes it to ``put``.

    Without ``checksums``, all checksums are 0: they tell token ids, and cost more than the rest of an event.
    """

    def __init__(self, put: Callable[[ev.Event], None], *, checksums: bool = True):
        self._put = put
        self._checksum: Callable[[Step], int] = checksum if checksums else _no_checksum
        self.next_step = 0
        """The number of the next step."""
        self.num_open = 0
        """The number of open requests."""
        self.unread: dict[int, Step] = {}
        """Launched steps whose result is unread, by their number."""
        self._planned: Sequence[tuple[int, int]] = ()  # rows of a plan whose step is not launched yet
        self._pool = (-1, -1, -1, -1)  # the last recorded page counts

    # ---- requests ------------------------------------------------------------------------------------

    @hookimpl
    def minisgl_request_added(self, req: Req, now: float) -> None:
        self.num_open += 1
        prompt = req.prompt_ids.tolist()
        limit, salt, priority = req.params.max_tokens, req.params.cache_salt, req.params.priority
        self._put(ev.Add(self.next_step, req.uid, now, prompt, limit, salt, priority, req.group))

    @hookimpl
    def minisgl_prefix_matched(self, req: Req, pages: I32, step: int) -> None:
        self._put(ev.Match(step=step, uid=req.uid, num_tokens=len(req), pages=pages.tolist(), priority=req.priority))

    @hookimpl
    def minisgl_request_retracted(self, req: Req, step: int) -> None:
        self._put(ev.Retract(step=step, uid=req.uid))

    @hookimpl
    def minisgl_request_finished(self, req: Req, now: float) -> None:
        self.num_open -= 1
        self._put(
            ev.Finish(step=self.next_step, uid=req.uid, t=now, finish_reason=str(req.finish_reason), error=req.error)
        )

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

    # ---- steps ---------------------------------------------------------------------------------------

    @hookimpl
    def minisgl_batch_planned(self, rows: Sequence[tuple[int, int]]) -> None:
        self._planned = rows

    @hookimpl
    def minisgl_batch_scheduled(self, step: Step, reqs: Sequence[Req], now: float) -> None:
        self._planned = ()
        self.next_step = step.id + 1
        self.unread[step.id] = step
        for admission in step.admissions:
            self._put(ev.Admit(step=step.id, uid=admission.uid, req_pool_idx=admission.req_pool_idx))
        if step.state_loads is not None or step.state_saves is not None:
            self._put(ev.States(step.id, _columns(step.state_loads), _columns(step.state_saves)))
        self._put(batch_event(step, list(map(attrgetter("uid"), reqs)), now, self._checksum(step)))

    @hookimpl
    def minisgl_step_finished(self, result: StepResult, reqs: Sequence[Req | None], now: float) -> None:
        self._put(
            ev.Done(
                step=result.id,
                t=now,
                tokens=result.tokens[:, 0].tolist(),
                checksum=self._checksum(self.unread.pop(result.id)),
                kept=[int(req is not None) for req in reqs] if None in reqs else None,
                runs=None if result.tokens.shape[1] == 1 else _runs(result),
                rounds=None if result.rounds is None else _rounds(result.rounds, result.accepted),
            )
        )

    @hookimpl
    def minisgl_closed(self) -> None:
        if self._planned:
            self._put(ev.Plan(step=self.next_step, rows=list(self._planned)))
        for step in self.unread.values():
            self._put(ev.Unread(step=step.id, checksum=self._checksum(step)))
        self._put(ev.End(step=self.next_step))


def batch_event(step: Step, uids: list[int], now: float, checksum: int) -> ev.Batch:
    """Return the event of the launch of a step. ``uids`` has the request of each row."""
    req_pool_indices, columns, pages = step.page_table_updates
    return ev.Batch(
        step=step.id,
        t=now,
        uids=uids,
        req_pool_indices=step.req_pool_indices.tolist(),
        num_computed_tokens=step.num_computed_tokens.tolist(),
        num_scheduled_tokens=step.num_scheduled_tokens.tolist(),
        num_decode=step.num_decode,
        num_sampled_tokens=step.num_sampled_tokens.tolist(),
        page_table_updates=(req_pool_indices.tolist(), columns.tolist(), pages.tolist()),
        checksum=checksum,
        drafts=_drafts(step),
        rounds=step.rounds,
    )


def _columns(arrays: tuple[I32, ...] | None) -> list[Any]:
    """Return the entries of equally long arrays, one tuple for each place."""
    return list(zip(*(array.tolist() for array in arrays or ()), strict=True))


def _drafts(step: Step) -> list[list[int]]:
    """Return the draft tokens of each verification row."""
    if not len(step.verification_rows):
        return []
    ends = np.cumsum(step.num_scheduled_tokens)
    begins = ends - step.num_scheduled_tokens
    return [step.input_ids[begins[i] + 1 : ends[i]].tolist() for i in step.verification_rows]


def _runs(result: StepResult) -> list[list[int]]:
    """Return the tokens of each row that count."""
    return [run[:n] for run, n in zip(result.tokens.tolist(), result.accepted.tolist(), strict=True)]


def _rounds(rounds: I32, accepted: I32) -> list[list[int]]:
    """Return how many of the ``accepted`` tokens of each row are those of each round, up to the round of the last."""
    so_far = np.minimum(rounds.cumsum(0), accepted)  # [rounds, rows]
    return [counts[counts > 0].tolist() for counts in np.diff(so_far, axis=0, prepend=0).T]


def _no_checksum(step: Step) -> int:
    return 0


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
