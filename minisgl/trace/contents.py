"""What the KV pool holds, as far as the events tell: the token prefix from which each KV location was computed.

A prefix is represented by a hash of its tokens. `Contents` follows what steps write to pages and what is inserted into
the prefix cache. `minisgl.trace.check` decides what a wrong content means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from minisgl.core import EngineSpec
from minisgl.trace import events as ev
from minisgl.trace.recurrent import RecurrentStates
from minisgl.trace.state import InFlightStep, Request, State

__all__ = ["Contents"]

_EMPTY = 0
_UNKNOWN = 2
"""Content of a position that was written before the trace began."""
_DRAFT = 1
"""Content of a position behind the accepted tokens of a step of several rounds: its draft is not known."""


class _TokenHashes:
    """Hashes of all prefixes of a token sequence that grows: ``hashes[i]`` is the hash of the first i + 1 tokens."""

    def __init__(self, tokens: Sequence[int], salt: str | None = None):
        self.hashes = np.empty(max(2 * len(tokens), 16), np.int64)
        self.length = 0
        self._last = _EMPTY if salt is None else hash(salt)
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        if self.length == len(self.hashes):
            self.hashes = np.concatenate((self.hashes, np.empty_like(self.hashes)))
        self._last = hash((self._last, token))
        self.hashes[self.length] = self._last
        self.length += 1

    def after(self, length: int, tokens: Sequence[int]) -> list[int]:
        """Return the hashes of the prefixes that end with each of ``tokens``, which follow the first ``length``."""
        hashes, last = [], int(self.hashes[length - 1])
        for token in tokens:
            last = hash((last, token))
            hashes.append(last)
        return hashes


class Contents:
    """Contents of the KV pool. `apply` follows events; `execute` reads and writes the pool as a step did."""

    def __init__(self, spec: EngineSpec):
        self.size = spec.page_size
        # [pages, page_size]: hash of the prefix that ends at this KV location
        self._kv = np.zeros((spec.num_pages, spec.page_size), np.int64)
        # cached page -> (hash of the prefix that ends with this page, uid of the request that inserted it)
        self._cached: dict[int, tuple[int, int]] = {}
        # uid -> (number of the request's tokens that are hashed, their hashes)
        self._requests: dict[int, tuple[int, _TokenHashes]] = {}
        # admission order -> hashes of the tokens that steps of this admission compute, discarded tokens included
        self._admissions: dict[int, _TokenHashes] = {}
        self._states = RecurrentStates(spec) if spec.has_states else None

    def apply(self, event: ev.Line, state: State) -> None:
        """Record admissions and evictions. ``state`` is the state after the event."""
        if isinstance(event, ev.Now):
            self._kv[:] = _UNKNOWN
            if self._states is not None:
                self._states.forget()
            self._cached = {page: (_UNKNOWN, -1) for _, pages, _, _ in event.tree for page in pages}
            for req in state.running.values():
                self._admissions[req.admission_order] = _TokenHashes(req.token_ids, req.added.cache_salt)
        elif isinstance(event, ev.Admit):
            req = state.all_requests[event.uid]
            self._admissions[req.admission_order] = _TokenHashes(req.token_ids, req.added.cache_salt)
        elif isinstance(event, ev.Evict):
            for page in event.pages:
                self._cached.pop(page, None)

    def insert(self, req: Request, event: ev.Cache) -> None:
        """Record that the cache took over pages of a request, which hold the request's prefix."""
        new_pages = set(event.pages)
        hashes = self._hashes(req)
        for i, page in enumerate(event.cached_pages, event.start):
            if page in new_pages:
                self._cached[page] = (int(hashes[(i + 1) * self.size - 1]), req.uid)

    def find_wrong_page(self, req: Request, pages: Sequence[int], start: int) -> tuple[int, int, str] | None:
        """Return the first cached page that holds another prefix than the request's, or None.

        ``pages`` are cached pages for the request's pages from number ``start`` on. The result is (number of the
        request's page, cached page, words for what the page holds).
        """
        hashes = self._hashes(req)
        for i, page in enumerate(pages, start):
            cached = self._cached.get(page)
            if cached is None or cached[0] not in (_UNKNOWN, hashes[(i + 1) * self.size - 1]):
                return i, page, "unknown KV" if cached is None else f"the prefix of request {cached[1]}"
        return None

    def find_wrong_state(self, batch: ev.Batch, state: State) -> tuple[Request | None, str] | None:
        """Follow the recurrent states of a step that is launched now, in the state before the launch.

        Return the request of the first row that goes on with another state than that of its own prefix, and words for
        what is wrong, or None.
        """
        if self._states is None:
            return None
        reqs = [state.all_requests[uid] for uid in batch.uids]
        return self._states.launch(batch, state.state_copies, reqs, self._prefix_hash)

    def _prefix_hash(self, req: Request, length: int) -> int | None:
        """Return the hash of the first tokens of a request, or None if it has fewer by now."""
        return int(self._hashes(req)[length - 1]) if length <= len(req.token_ids) else None

    def execute(self, step: InFlightStep, event: ev.Done) -> tuple[int, int, int, str] | None:
        """Read and write the pool as a step did.

        Return the first KV that a row reads and that is not of the row's own prefix, as (uid, page, position, words for
        what is there), or None.
        """
        batch = step.batch
        rows = list(
            zip(
                batch.uids,
                step.admission_orders,
                step.pages,
                batch.num_computed_tokens,
                batch.num_scheduled_tokens,
                strict=True,
            )
        )
        for uid, admission_order, pages, start, _ in rows:
            if not start or admission_order < 0:
                continue
            own = self._admissions[admission_order].hashes[:start]
            read = self._kv[pages[: -(-start // self.size)]].reshape(-1)[:start]
            for position in np.flatnonzero((read != own) & (read != _UNKNOWN))[:1]:
                content = "KV that was never written" if read[position] == 0 else "the KV of another prefix"
                return uid, int(pages[position // self.size]), int(position), content
        for i, (_, admission_order, pages, start, count) in enumerate(rows):
            if admission_order < 0:  # of a request that had ended or had been retracted when the trace began
                continue
            tokens, positions = self._admissions[admission_order], np.arange(start, start + count)
            run = event.run(i, bool(batch.num_sampled_tokens[i]))
            verified = i - batch.num_decode
            if batch.rounds > 1:
                written = np.arange(start, start + batch.rounds * count)
                self._kv[pages[written // self.size], written % self.size] = _DRAFT
                for token in run:
                    tokens.append(token)
                positions = written[: len(run)]
                self._kv[pages[positions // self.size], positions % self.size] = tokens.hashes[positions]
                continue
            if 0 <= verified < len(batch.drafts):
                hashes = [int(tokens.hashes[start]), *tokens.after(start + 1, batch.drafts[verified])]
                self._kv[pages[positions // self.size], positions % self.size] = hashes
            else:
                self._kv[pages[positions // self.size], positions % self.size] = tokens.hashes[positions]
            for token in run:
                tokens.append(token)
        return None

    def _hashes(self, req: Request) -> Any:
        """Return the hashes of all prefixes of a request's tokens, int64. Later elements are undefined."""
        if req.uid not in self._requests:
            self._requests[req.uid] = (0, _TokenHashes((), req.added.cache_salt))
        length, tokens = self._requests[req.uid]
        for token in req.token_ids[length:]:
            tokens.append(token)
        self._requests[req.uid] = (len(req.token_ids), tokens)
        return tokens.hashes
