"""The events of a trace: one struct for each kind, which the recorder writes and every reader decodes.

A line of a trace is a JSON object. Its field ``event`` names the kind of the event. This module defines the format; it
does not know which runs are correct.
"""

from __future__ import annotations

from typing import Any

import msgspec

VERSION = 3
"""Version of the trace format. A reader refuses every other version."""

PageTableUpdates = tuple[list[int], list[int], list[int]]
"""Writes to the page table: (request-pool rows, page columns, pages), each a list ``[writes]``."""


class Event(msgspec.Struct, tag_field="event", tag=str.lower, gc=False):
    """Base class of all events.

    ``step`` is the number of the step that is being built, or of the last launched step. The hook of the event in
    `minisgl.hooks` says which of the two.
    """

    step: int


class Header(Event, kw_only=True):
    """First line of a trace.

    ``spec`` has the fields of `EngineSpec`. ``plugins`` lists the files that the option ``plugins=`` named.
    ``hidden_tokens``: all token ids were replaced by 0, as the live view does without ``live.text``.
    """

    version: int
    minisgl: str
    spec: dict[str, int]
    options: dict[str, Any]
    plugins: list[dict[str, str]] = []
    hidden_tokens: bool = False
    step: int = 0


class Add(Event):
    """A request entered the waiting queue.

    ``t`` is the time on the scheduler's clock, in seconds, here and in all other events. ``step`` is the number of the
    next step. ``group`` is the same number for all choices of one HTTP request; 0: it has only one, or the trace was
    recorded before there was this field.
    """

    uid: int
    t: float
    prompt_ids: list[int]
    max_tokens: int
    cache_salt: str | None = None
    priority: int = 0
    group: int = 0


class Match(Event):
    """A waiting request is about to be admitted.

    ``num_tokens`` is the length of the request in tokens: prompt and output. ``pages`` are the cached pages of the
    request's prefix. They are now locked for the request. ``priority`` is the request's own, or the one that it
    inherited when it was starved.
    """

    uid: int
    num_tokens: int
    pages: list[int]
    priority: int = 0


class Admit(Event):
    """A request was admitted and got a row of the request pool."""

    uid: int
    req_pool_idx: int


class Allocate(Event):
    """Pages were allocated to requests: ``pages[i]`` to the request with the uid ``owners[i]``."""

    owners: list[int]
    pages: list[int]


class Evict(Event):
    """The prefix cache evicted pages."""

    pages: list[int]


class Plan(Event):
    """A step was planned but never launched, because the run failed in between.

    ``rows`` are pairs (uid, number of tokens). The plan of a launched step is not recorded: its `Batch` says the same.
    """

    rows: list[tuple[int, int]]


class States(Event):
    """The step that is launched next copies recurrent states. Only steps that copy some have this event.

    ``loads`` are pairs (slot, request-pool row): before the forward pass, a saved state becomes that of a row's
    request. ``saves`` are (row of the step, position, slot): the state of a row is copied when the row gets to the
    position. The states of running requests are in the slots of their request-pool rows, and copies in those behind.
    """

    loads: list[tuple[int, int]]
    saves: list[tuple[int, int, int]]


class Batch(Event):
    """A step was launched.

    The lists ``uids`` to ``num_sampled_tokens`` have one entry for each row of the step. The first ``num_decode`` rows
    are decode rows, and the next ``len(drafts)`` rows verify ``drafts``, the draft tokens of each of them.
    ``num_computed_tokens`` is the first position that a row computes. ``num_sampled_tokens`` is the number of its last
    positions after which it samples. ``checksum`` is the CRC-32 of the step's arrays at the launch.

    With ``rounds`` > 1, every row verifies as often, each time from the position of its last accepted token on, and
    ``drafts`` are those of the first round: the engine makes the others.
    """

    t: float
    uids: list[int]
    req_pool_indices: list[int]
    num_computed_tokens: list[int]
    num_scheduled_tokens: list[int]
    num_decode: int
    num_sampled_tokens: list[int]
    page_table_updates: PageTableUpdates
    checksum: int
    drafts: list[list[int]] = []
    rounds: int = 1

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the prefill chunks, which come after the decode and verification rows."""
        return sum(self.num_scheduled_tokens[self.num_decode + len(self.drafts) :])


class Cache(Event):
    """Pages of a request were offered to the prefix cache.

    ``cached_pages`` are the cache's pages for the request's pages from number ``start`` on. The cache took over those
    of them that are listed in ``pages``. It had the other pages before; the request's own copies of them are
    duplicates, which the request retires next.
    """

    uid: int
    start: int
    pages: list[int]
    cached_pages: list[int]


class Free(Event):
    """A request retired pages. The pages become free when the result of every step up to ``step`` has been read."""

    uid: int
    pages: list[int]


class Retract(Event):
    """A running request was retracted: it lost its request-pool row and waits again."""

    uid: int


class Done(Event, tag="step"):
    """The result of a step was read.

    ``tokens[i]`` is the token that row i sampled. ``kept[i]`` is 1 if the request of row i gained this token, and 0 if
    not; ``kept`` is None if all requests gained their tokens. If the step verified drafts, ``runs[i]`` lists all tokens
    of row i that count, up to a stop token, and ``tokens[i]`` is the first of them. If it did this in several rounds,
    ``rounds[i]`` lists how many tokens of row i count in each round, up to that of a stop token. ``checksum`` is the
    CRC-32 of the step's arrays at this time. If it differs from the checksum in `Batch`, the launched step was changed.
    """

    t: float
    tokens: list[int]
    checksum: int
    kept: list[int] | None = None
    runs: list[list[int]] | None = None
    rounds: list[list[int]] | None = None

    @property
    def gained(self) -> list[int]:
        """``kept``, also if all requests gained their tokens: 1 for each row."""
        return self.kept or [1] * len(self.tokens)

    def run(self, row: int, sampled: bool) -> list[int]:
        """Return the tokens of a row that count; ``sampled`` says whether the row samples."""
        if self.runs is not None:
            return self.runs[row]
        return [self.tokens[row]] if sampled else []


class Unread(Event):
    """The trace ends, and the result of this launched step was never read. ``checksum`` as in `Done`."""

    checksum: int


class Pool(Event):
    """Page counts of the scheduler at the end of a turn of its loop. Written when a count has changed."""

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


class OpenRequest(msgspec.Struct, gc=False):
    """A request that is open at the moment of `Now`."""

    uid: int
    arrival: int
    """The number of requests that came before."""
    added: int
    """``step`` of its `Add`."""
    t: float
    """Time of its arrival."""
    prompt: int
    """Number of prompt tokens."""
    output: int
    """Number of output tokens so far."""
    max: int
    """``max_tokens``"""
    priority: int
    queued: int
    """The step for which it began to wait."""
    row: int
    """Row in the request pool, or -1 while it waits."""
    order: int
    """The number of admissions before its own, or -1 while it waits."""
    prefill: int
    """Length in tokens when it was admitted last."""
    computed: int
    """Positions whose KV is cached or computed by launched steps."""
    cached: list[int]
    """Pages of the prefix that is locked for it."""
    hit: int
    """Tokens that it found in the cache at its first admission, or -1 before."""
    admitted: float
    """Time of its first admission, or 0."""
    first: float
    """Time of its first token, or 0."""
    retractions: int
    pages: list[int]
    """Its pages, in order."""
    salt: str | None = None
    """Its ``cache_salt``, or a name for it."""


class Now(Event, kw_only=True):
    """The state with which a trace begins if its recorder came after the first request. ``step`` is the next step.

    ``read`` is the last step whose result was read, ``added`` and ``admitted`` are the numbers of requests and of
    admissions so far. ``owner`` and ``refs`` are run-length encoded, [value, count]: the owner of each page, and the
    number of requests for which it is locked. A node of ``tree`` is [index of its parent or -1, pages, users, step of
    its last use]; a node comes before its children. ``retiring`` and ``unlocks`` are [step whose result must be read
    before, pages]. ``mean_length`` is that of answers, from which the scheduler takes its reserve of pages; 0: not
    known. Without ``hidden_tokens``, ``tokens`` has the token ids of cached pages, and ``ids`` those of the
    open requests, by uid.
    """

    t: float
    read: int
    added: int
    admitted: int
    requests: list[OpenRequest]
    owner: list[tuple[int, int]]
    refs: list[tuple[int, int]]
    tree: list[tuple[int, list[int], int, int]]
    in_flight: list[Batch]
    retiring: list[tuple[int, list[int]]]
    unlocks: list[tuple[int, list[int]]]
    mean_length: float = 0.0
    tokens: list[tuple[int, list[int]]] = []
    ids: dict[int, list[int]] = {}


class End(Event):
    """The scheduler ended and closed its trace."""


Line = (
    Header
    | Now
    | Add
    | Match
    | Admit
    | Allocate
    | Evict
    | Plan
    | States
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
