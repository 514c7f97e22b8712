"""Steps with prompts, replayed in pieces: what lies between two calls of attention is recorded, attention is not.

How a prompt's attention is computed is planned anew for each step, down to which kernels are launched, so it can't be
replayed. Everything else in a layer depends on nothing but the number of tokens. (Others call these piecewise CUDA
graphs.) Knows backends, and no step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from minisgl.attention import AttentionBackend, AttnBatch, AttnNeeds, GraphKey, LayerSpec
from minisgl.kernel.launch import between_pieces

if TYPE_CHECKING:
    from minisgl.kvcache.pool import KVPool

__all__ = ["PiecewiseAttention"]


class PiecewiseAttention:
    """A backend, as the layers of a model see it whose steps are replayed in pieces.

    In a bucket of tokens, a call of ``forward`` ends one piece and begins the next; what stands between them attends
    for the step's tokens and leaves padding alone. Elsewhere a call is the backend's own.
    """

    def __init__(self, backend: AttentionBackend):
        self.backend = backend
        self._tokens: int | None = None  # of a step that are in the bucket; 0: it is being recorded; None: no bucket

    @contextmanager
    def in_bucket(self, tokens: int) -> Iterator[None]:
        """What runs inside is a bucket's: one that is replayed, with a step's ``tokens`` first and padding behind them,
        or (0) one that is recorded, for no step."""
        self._tokens = tokens
        try:
            yield
        finally:
            self._tokens = None

    def needs(self) -> AttnNeeds:
        return self.backend.needs()

    def bind(self, pool: KVPool, layers: Sequence[LayerSpec], keys: Sequence[GraphKey]) -> None:
        self.backend.bind(pool, layers, keys)

    def plan(self, batch: AttnBatch) -> None:
        self.backend.plan(batch)

    def forward(self, layer: LayerSpec, q: Tensor, out: Tensor) -> Tensor:
        if self._tokens is None:
            return self.backend.forward(layer, q, out)
        out.zero_()  # nobody writes what padding attends to, and what lay there before may be no number
        self._attend(layer, q, out)
        return out

    @between_pieces
    def _attend(self, layer: LayerSpec, q: Tensor, out: Tensor) -> None:
        if self._tokens:  # nothing is planned while a bucket is recorded
            self.backend.forward(layer, q[: self._tokens], out[: self._tokens])
