"""The interface of a routing policy: what a router knows of each replica, and the choice of one for a request.

A *replica* is one of several servers of the same model behind a router. A policy chooses a replica for each request. It
does no I/O and reads no clock, so the same policies serve the HTTP router of `minisgl.cluster` and the simulation
`python -m minisgl.bench cluster`. Policies are plugins (group `routing`): the shipped ones are in `plugins/routing/`.

The router keeps one `Replica` for each server: it applies the server's KV events to it and tells it when a request
begins and ends. The block hashes are those of `minisgl.cluster.kv_events`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple, Protocol

from minisgl.cluster.kv_events import AnyEvent, BlockRemoved, BlockStored

__all__ = ["NoReplicaError", "OpenRequest", "Replica", "RoutingPolicy", "live_replicas"]


class NoReplicaError(RuntimeError):
    """No replica is alive, so a request can't be routed."""


class OpenRequest(NamedTuple):
    """A request that was sent to a replica and has not ended."""

    block_hashes: tuple[int, ...]  # of the whole blocks of its prompt
    prompt_tokens: int
    output_tokens: int  # the largest number of output tokens
    new_tokens: int  # prompt tokens that the replica must compute, by the view at the time of the choice


class Replica:
    """The view that a router has of one replica. A policy reads it; only the router changes it.

    The view may be stale: events arrive after the fact, and some may be lost. A wrong view costs prefix hits and never
    an error: the replica computes what it has not cached.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.alive = True
        """Whether the replica takes requests. A policy must not choose one that does not."""
        self.blocks: set[int] = set()
        """Hashes of the blocks that the replica has cached, by its KV events."""
        self.prompt_tokens = 0
        """Prompt tokens of the open requests."""
        self.output_tokens = 0
        """Largest number of output tokens of the open requests."""
        self.waiting_tokens = 0
        """Prompt tokens to compute (``new_tokens``) of the open requests that have no output token yet."""
        self._open: dict[Hashable, OpenRequest] = {}
        self._waiting: set[Hashable] = set()
        self._expected: dict[int, int] = {}  # block of an open prompt -> number of open prompts that contain it

    @property
    def requests(self) -> int:
        """Number of open requests."""
        return len(self._open)

    def cached_blocks(self, block_hashes: Sequence[int]) -> int:
        """Return how many leading blocks of a prompt the replica has cached, or will have from an open request."""
        blocks, expected = self.blocks, self._expected
        return sum(1 for _ in takewhile(lambda block: block in blocks or block in expected, block_hashes))

    def new_tokens(self, block_hashes: Sequence[int], prompt_tokens: int) -> int:
        """Return how many tokens of a prompt the replica would have to compute: at least 1."""
        return max(prompt_tokens - self.block_size * self.cached_blocks(block_hashes), 1)

    # ---- for the router ----------------------------------------------------------------------------------

    def apply(self, events: Iterable[AnyEvent]) -> None:
        """Apply the KV events of a message."""
        for event in events:
            if isinstance(event, BlockStored):
                self.blocks.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.blocks.difference_update(event.block_hashes)
            else:
                self.blocks.clear()

    def start(self, key: Hashable, block_hashes: Sequence[int], prompt_tokens: int, output_tokens: int) -> None:
        """Record a request that is sent to the replica. ``key`` identifies it among the replica's open requests."""
        new_tokens = self.new_tokens(block_hashes, prompt_tokens)
        self._open[key] = OpenRequest(tuple(block_hashes), prompt_tokens, output_tokens, new_tokens)
        self._waiting.add(key)
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens
        self.waiting_tokens += new_tokens
        for block in block_hashes:
            self._expected[block] = self._expected.get(block, 0) + 1

    def first_token(self, key: Hashable) -> None:
        """Record that an open request has its first output token. A second call does nothing.

        A router that can't see the token of a response need not call this: `end` implies it.
        """
        if key in self._waiting:
            self._waiting.remove(key)
            self.waiting_tokens -= self._open[key].new_tokens

    def end(self, key: Hashable) -> None:
        """Record the end of a request. Does nothing if it is not open, as after `stop`."""
        if key not in self._open:
            return
        self.first_token(key)
        request = self._open.pop(key)
        self.prompt_tokens -= request.prompt_tokens
        self.output_tokens -= request.output_tokens
        for block in request.block_hashes:
            self._expected[block] -= 1
            if not self._expected[block]:
                del self._expected[block]

    def stop(self) -> None:
        """Record that the replica is dead: it has no cache and no open requests, and takes none."""
        self.alive = False
        for kept in (self.blocks, self._open, self._waiting, self._expected):
            kept.clear()
        self.prompt_tokens = self.output_tokens = self.waiting_tokens = 0


class RoutingPolicy(Protocol):
    """Chooses the replica of each request. A policy belongs to one router, and may keep state between requests."""

    def choose(self, block_hashes: Sequence[int], prompt_tokens: int, replicas: Sequence[Replica]) -> int:
        """Return the index of a living replica. Raise `NoReplicaError` if there is none.

        The router follows the choice, or asks again if the replica can't be reached.

        - ``block_hashes``: hashes of the whole blocks of the prompt, in order. Empty for a short prompt, and if the
          router does not know its tokens.
        - ``prompt_tokens``: length of the prompt in tokens; an estimate if the router does not know its tokens.
        - ``replicas``: the replicas. Each has the same index in every call, dead or alive; new ones are added at the
          end.
        """


def live_replicas(replicas: Sequence[Replica]) -> list[int]:
    """Return the indices of the living replicas. Raise `NoReplicaError` if there is none."""
    live = [index for index, replica in enumerate(replicas) if replica.alive]
    if not live:
        raise NoReplicaError(f"None of the {len(replicas)} replicas is alive.")
    return live
