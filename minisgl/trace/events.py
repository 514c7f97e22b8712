"""The lines of a trace: one struct for each kind of event, as the recorder writes and every reader reads them.

A line is a JSON object whose ``event`` names the kind. Knows the format and nothing of what makes a run right.
"""

from __future__ import annotations

from typing import Any

import msgspec

VERSION = 2
"""Of the format. A reader refuses another one."""

Table = tuple[list[int], list[int], list[int]]
"""(slot, page column, page), each [writes]."""


class Event(msgspec.Struct, tag_field="event", tag=str.lower, gc=False):
    """``step`` is the step being built, or the last one launched: its hook in `minisgl.hooks` says which."""

    step: int


class Header(Event, kw_only=True):
    """The first line. ``spec`` is `EngineSpec`'s fields; ``plugins`` are the files that ``plugins=`` named."""

    version: int
    minisgl: str
    spec: dict[str, int]
    options: dict[str, Any]
    plugins: list[dict[str, str]] = []
    step: int = 0


class Add(Event):
    """A request waits. ``t`` is the scheduler's clock in seconds, here and below; ``step`` is the next one's."""

    uid: int
    t: float
    prompt_ids: list[int]
    max_tokens: int


class Match(Event):
    """A request of ``tokens`` tokens is about to take a slot; ``pages`` hold its cached prefix, now locked for it."""

    uid: int
    tokens: int
    pages: list[int]


class Admit(Event):
    """A request took a slot."""

    uid: int
    req_pool_idx: int


class Allocate(Event):
    """``owners[i]`` (uids) took ``pages[i]``."""

    owners: list[int]
    pages: list[int]


class Evict(Event):
    """The cache gave up pages."""

    pages: list[int]


class Plan(Event):
    """Rows (uid, tokens) that were planned and never launched: the run failed on the way. A launched plan is its
    batch."""

    rows: list[tuple[int, int]]


class Batch(Event):
    """A step was launched. Rows up to ``decode`` are decode rows. ``sums`` is a checksum of the step's arrays."""

    t: float
    uids: list[int]
    req_pool_indices: list[int]
    num_computed_tokens: list[int]
    num_scheduled_tokens: list[int]
    num_decode: int
    sample: list[int]
    page_table_updates: Table
    sums: int


class Cache(Event):
    """The cache holds ``held`` for a request's pages from number ``start`` on. It took over ``pages`` of them; where it
    had others already, the request's own are duplicates, and given back."""

    uid: int
    start: int
    pages: list[int]
    cached_pages: list[int]


class Free(Event):
    """A request gave back pages: free once every step up to ``step`` was read."""

    uid: int
    pages: list[int]


class Retract(Event):
    """A request lost its slot and waits again."""

    uid: int


class Done(Event, tag="step"):
    """A step's result was read: row i sampled ``tokens[i]``. ``gained`` [rows] is 0 where the request did not get it;
    None: all did. ``sums`` as in `Batch`, taken now: another one means that somebody changed a launched step."""

    t: float
    tokens: list[int]
    sums: int
    gained: list[int] | None = None


class Unread(Event):
    """At the end of the trace: the result of this launched step was never read. ``sums`` as in `Done`."""

    sums: int


class Pool(Event):
    """What the scheduler's books say after a turn, in pages; written when it differs from the last."""

    free: int
    cached: int
    evictable: int
    retiring: int


class Finish(Event):
    """A request ended."""

    uid: int
    t: float
    finish_reason: str
    error: str = ""


class End(Event):
    """The scheduler ended, and closed its trace."""


Line = (
    Header
    | Add
    | Match
    | Admit
    | Allocate
    | Evict
    | Plan
    | Batch
    | Cache
    | Free
    | Retract
    | Done
    | Unread
    | Pool
    | Finish
    | End
)

encoder = msgspec.json.Encoder()
decoder = msgspec.json.Decoder(Line)
