"""What an attention backend is asked for. Backends are plugins; this names none.

A backend does not store KV: the layer does, before it asks for attention, so that QK-norm, RoPE and the store can be
one launch. ``plan`` runs once a step on the compute stream, never inside a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from minisgl.core import I32

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from minisgl.kvcache.pool import KVPool

__all__ = ["AttentionBackend", "AttnBatch", "AttnNeeds", "GraphKey", "LayerSpec"]


class GraphKey(NamedTuple):
    """A bucket of the graph runner: ``rows`` decode rows of ``q_len`` tokens each; ``shared``: that share a prefix.

    With ``q_len`` 0, ``rows`` counts tokens, of whatever rows, prompts among them. Their attention is no part of the
    recording, which is made in pieces around it, and no backend is told of such a bucket.
    """

    rows: int
    q_len: int = 1
    shared: bool = False

    @property
    def piecewise(self) -> bool:
        return self.q_len == 0


@dataclass(frozen=True, slots=True)
class AttnNeeds:
    """What a backend asks of the pool, before the pool exists. ``refuse`` says why it can't serve here at all."""

    page_sizes: tuple[int, ...] | None = None  # None: any
    layout: Literal["NHD", "HND"] = "NHD"
    kv_dtypes: tuple[torch.dtype, ...] | None = None  # None: any
    workspace: int = 0  # bytes
    phases: frozenset[str] = frozenset({"decode", "extend"})
    graph: bool = False  # a decode step can be recorded and replayed
    shared: bool = False  # decode reads a prefix that all rows share once: AttnBatch.shared is looked at
    refuse: str = ""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer as a backend sees it; head counts are local to the rank."""

    index: int
    q_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = -1  # positions that a query sees, its own included; -1: all
    soft_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class AttnBatch:
    """The rows of one step: ``[:num_decode]`` have one query token, the rest are prefill chunks.

    Row r's queries are the last ``q_indptr[r+1] - q_indptr[r]`` positions of its ``kv_len[r]``; their KV is (or will
    be, layer by layer, before ``forward``) in the pages that ``table[slots[r]]`` lists.
    """

    num_decode: int
    q_indptr_host: I32  # [rows + 1]
    kv_len_host: I32  # [rows]; exact today, an upper bound with speculation
    q_indptr: Tensor  # device twins, int32
    kv_len: Tensor
    slots: Tensor  # [rows] int32
    table: Tensor  # [slots + 1, max_pages] int32, the live table
    key: GraphKey | None = None  # set: the tensors above are the bucket's static buffers
    shared: Tensor | None = None  # [1] int32, where it pays: leading positions that all decode rows have in one place

    def part(self, first: int, last: int) -> AttnBatch:
        """Rows ``first`` to ``last`` as a batch of their own, on the same tensors. Decode rows have one query token."""
        return replace(
            self,
            num_decode=max(0, min(self.num_decode, last) - first),
            q_indptr_host=self.q_indptr_host[first : last + 1] - self.q_indptr_host[first],
            kv_len_host=self.kv_len_host[first:last],
            q_indptr=self.q_indptr[first : last + 1] - self.q_indptr[first] if first else self.q_indptr[: last + 1],
            kv_len=self.kv_len[first:last],
            slots=self.slots[first:last],
        )


class AttentionBackend(Protocol):
    """Attention over pages. One object serves all layers of one engine."""

    def needs(self) -> AttnNeeds:
        """Asked first, before the pool exists."""

    def bind(self, pool: KVPool, layers: Sequence[LayerSpec], keys: Sequence[GraphKey]) -> None:
        """Given the pool and every layer once, and the graph buckets that will be captured."""

    def plan(self, batch: AttnBatch) -> None:
        """Prepare for a step: whatever is the same in all layers."""

    def forward(self, layer: LayerSpec, q: Tensor, out: Tensor) -> Tensor:
        """q, out [tokens, q_heads, head_dim]; writes ``out`` and returns it. This layer's KV is already stored."""
