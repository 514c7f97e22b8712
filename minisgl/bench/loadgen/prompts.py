"""Prompts of given lengths: random tokens of a vocabulary, with common prefixes where a workload has them.

A prompt depends on the seed and on the request's index only. So every client process builds the prompts of its own
requests, and no prompt is sent between processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from minisgl.bench.loadgen.traces import HASH_BLOCK, TraceRequest

I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Vocabulary:
    """The tokens from which prompts are drawn: their ids and, for prompts as text, their texts in the same order."""

    ids: I64
    words: tuple[str, ...] = ()

    def prompt(self, drawn: I64) -> list[int] | str:
        """Return the prompt of the tokens at the positions ``drawn`` of the vocabulary, as text if it has words."""
        return "".join(self.words[i] for i in drawn.tolist()) if self.words else self.ids[drawn].tolist()


class Workload(Protocol):
    """The requests of a measurement, by index. ``count`` is None if there is no limit."""

    @property
    def count(self) -> int | None: ...

    def request(self, index: int) -> TraceRequest:
        """Return the lengths of request ``index``, which is at least 0."""
        ...


@dataclass(frozen=True)
class RandomWorkload:
    """Requests with lengths drawn uniformly from the inclusive ranges ``inputs`` and ``outputs``."""

    count: int | None
    inputs: tuple[int, int]
    outputs: tuple[int, int]
    seed: int

    def request(self, index: int) -> TraceRequest:
        rng = np.random.default_rng((self.seed, 0, index))
        input_len = int(rng.integers(self.inputs[0], self.inputs[1] + 1))
        return TraceRequest(None, input_len, int(rng.integers(self.outputs[0], self.outputs[1] + 1)))


@dataclass(frozen=True)
class TraceWorkload:
    """The requests of a trace."""

    requests: Sequence[TraceRequest] = field(repr=False)

    @property
    def count(self) -> int:
        return len(self.requests)

    def request(self, index: int) -> TraceRequest:
        return self.requests[index % len(self.requests)]  # a warm-up request may have any index


@dataclass(frozen=True)
class PromptFactory:
    """Builds the prompt of each request.

    ``shared`` is the length of a prefix that all prompts have in common. A hash id is a block of ``block_size`` tokens.
    """

    vocabulary: Vocabulary
    seed: int
    shared: int = 0
    block_size: int = HASH_BLOCK

    def build(self, index: int, request: TraceRequest) -> list[int] | str:
        """Return the prompt of request ``index`` as token ids or as text."""
        if request.prompt is not None:
            return request.prompt if isinstance(request.prompt, str) else list(request.prompt)
        blocks = [self._draw(self.block_size, 3, hash_id) for hash_id in request.hash_ids]
        blocks.append(self._draw(max(0, request.input_len - self.block_size * len(blocks)), 1, index))
        own = np.concatenate(blocks)[: request.input_len]
        return self.vocabulary.prompt(np.concatenate([self._draw(self.shared, 2), own]))

    def _draw(self, count: int, *key: int) -> I64:
        """Return ``count`` random positions of the vocabulary. Equal keys give equal positions."""
        return np.random.default_rng((self.seed, *key)).integers(0, len(self.vocabulary.ids), count)
