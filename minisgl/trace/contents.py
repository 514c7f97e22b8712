"""What pages hold, by the events: which prefix each position of the KV pool was computed from.

A prefix is known by a hash of its tokens. Knows what steps write and what a cache was given; whether a row may read it
is `check`'s question.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from minisgl.core import EngineSpec
from minisgl.trace import events as ev
from minisgl.trace.state import Launch, Request, State

__all__ = ["Contents"]

_EMPTY = 0


class _Stream:
    """The tokens that one seat computes, also those that nobody gets; ``hashes[i]`` is of the first i + 1."""

    def __init__(self, tokens: Sequence[int]):
        self.hashes = np.empty(max(2 * len(tokens), 16), np.int64)
        self.length = 0
        self._last = _EMPTY
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        if self.length == len(self.hashes):
            self.hashes = np.concatenate((self.hashes, np.empty_like(self.hashes)))
        self._last = hash((self._last, token))
        self.hashes[self.length] = self._last
        self.length += 1


class Contents:
    """``apply`` follows events; ``execute`` lets a step read and write the pool, when its result is read."""

    def __init__(self, spec: EngineSpec):
        self.size = spec.page_size
        self._kv = np.zeros((spec.num_pages, spec.page_size), np.int64)  # hash of the prefix that ends there
        self._labels: dict[int, tuple[int, int]] = {}  # cached page -> hash of the prefix it completes, and whose
        self._streams: dict[int, tuple[int, _Stream]] = {}  # uid -> tokens it was hashed with, and their stream
        self._seats: dict[int, _Stream] = {}  # admission -> the tokens its slot sees

    def apply(self, event: ev.Line, state: State) -> None:
        """Book who is seated with which tokens, and what left the cache."""
        if isinstance(event, ev.Admit):
            req = state.requests[event.uid]
            self._seats[req.seat] = _Stream(req.tokens)
        elif isinstance(event, ev.Evict):
            for page in event.pages:
                self._labels.pop(page, None)

    def label(self, req: Request, event: ev.Cache) -> None:
        """The pages that the cache takes over from a request hold its prefix."""
        fresh = set(event.pages)
        hashes = self._hashes(req)
        for i, page in enumerate(event.cached_pages, event.start):
            if page in fresh:
                self._labels[page] = (int(hashes[(i + 1) * self.size - 1]), req.uid)

    def foreign(self, req: Request, pages: Sequence[int], start: int) -> tuple[int, int, str] | None:
        """The first of the cache's ``pages``, from number ``start`` on, that holds another prefix than the request's:
        its number, the page, and what it holds."""
        hashes = self._hashes(req)
        for i, page in enumerate(pages, start):
            label = self._labels.get(page)
            if label is None or label[0] != hashes[(i + 1) * self.size - 1]:
                return i, page, "nothing that is known" if label is None else f"the prefix of request {label[1]}"
        return None

    def execute(self, launch: Launch, event: ev.Done) -> tuple[int, int, int, str] | None:
        """Let the step read and write; what a row reads that is not its own prefix: (uid, page, position, words)."""
        batch = launch.batch
        rows = list(
            zip(
                batch.uids,
                launch.seats,
                launch.pages,
                batch.num_computed_tokens,
                batch.num_scheduled_tokens,
                strict=True,
            )
        )
        for uid, seat, pages, start, _ in rows:
            if not start:
                continue
            own = self._seats[seat].hashes[:start]
            read = self._kv[pages[: -(-start // self.size)]].reshape(-1)[:start]
            for position in np.flatnonzero(read != own)[:1]:
                words = "what was never written" if read[position] == 0 else "the KV of another prefix"
                return uid, int(pages[position // self.size]), int(position), words
        for i, (_, seat, pages, start, count) in enumerate(rows):
            stream, at = self._seats[seat], np.arange(start, start + count)
            self._kv[pages[at // self.size], at % self.size] = stream.hashes[at]
            if batch.sample[i]:
                stream.append(event.tokens[i])
        return None

    def _hashes(self, req: Request) -> Any:
        known = self._streams.get(req.uid)
        if known is None:
            known = self._streams[req.uid] = (0, _Stream(()))
        length, stream = known
        for token in req.tokens[length:]:
            stream.append(token)
        self._streams[req.uid] = (len(req.tokens), stream)
        return stream.hashes
