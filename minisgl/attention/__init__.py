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
    shared_prefix: bool = False

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
    shared_prefix: bool = False  # decode reads a prefix that all rows share once: AttnBatch.shared is looked at
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

    Row r's queries are the last ``cu_seqlens_q[r+1] - cu_seqlens_q[r]`` positions of its ``seq_lens[r]``; their KV is
    (or will
    be, layer by layer, before ``forward``) in the pages that ``table[slots[r]]`` lists.
    """

    num_decode: int
    cu_seqlens_q_cpu: I32  # [rows + 1]
    seq_lens_cpu: I32  # [rows]; exact today, an upper bound with speculation
    cu_seqlens_q: Tensor  # device twins, int32
    seq_lens: Tensor
    req_pool_indices: Tensor  # [rows] int32
    page_table: Tensor  # [slots + 1, max_pages] int32, the live table
    graph_key: GraphKey | None = None  # set: the tensors above are the bucket's static buffers
    shared_prefix_len: Tensor | None = (
        None  # [1] int32, where it pays: leading positions that all decode rows have in one place
    )

    def slice_rows(self, first: int, last: int) -> AttnBatch:
        """Rows ``first`` to ``last`` as a batch of their own, on the same tensors. Decode rows have one query token."""
        return replace(
            self,
            num_decode=max(0, min(self.num_decode, last) - first),
            cu_seqlens_q_cpu=self.cu_seqlens_q_cpu[first : last + 1] - self.cu_seqlens_q_cpu[first],
            seq_lens_cpu=self.seq_lens_cpu[first:last],
            cu_seqlens_q=self.cu_seqlens_q[first : last + 1] - self.cu_seqlens_q[first]
            if first
            else self.cu_seqlens_q[: last + 1],
            seq_lens=self.seq_lens[first:last],
            req_pool_indices=self.req_pool_indices[first:last],
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
