"""Interface of attention backends and the data that it passes. Backends are plugins; this module knows none of them.

Implementations are in `plugins/attention/`: `torch.py`, `triton.py`, `flashinfer.py`, `flash_attn.py`, `trtllm.py` …

A backend does not store KV. The attention layer stores KV before it calls the backend, so that QK-norm, RoPE and the
store can be one kernel launch. ``plan`` runs once per step on the compute stream, never inside a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from minisgl.core import I32

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from minisgl.kvcache.pool import KVPool
    from minisgl.plugins.kernels.ops.fp8 import QuantizedRows
    from minisgl.plugins.kernels.ops.rope import QKNorm

__all__ = [
    "MAX_PROJECTED_ROWS",
    "AttentionBackend",
    "AttnBatch",
    "AttnNeeds",
    "GraphKey",
    "LayerSpec",
    "ProjectedDecode",
    "QuantizedAttention",
    "projected_decode",
    "quantized_attention",
]

MAX_PROJECTED_ROWS = 4
"""The most rows of a step that is computed with `ProjectedDecode`. With more rows it was not faster on an H200."""


class GraphKey(NamedTuple):
    """Bucket of a graph runner: ``rows`` decode rows of ``q_len`` query tokens each.

    ``shared_prefix`` marks a bucket for steps whose rows all share a prefix (`AttnBatch.shared_prefix_len`).

    With ``q_len`` 0 the bucket is piecewise: ``rows`` counts tokens, and the step may contain prompts. The recording
    then consists of pieces between the calls of attention. Attention is not recorded, so backends do not get this key.
    """

    rows: int
    q_len: int = 1
    shared_prefix: bool = False

    @property
    def piecewise(self) -> bool:
        """Whether the bucket holds tokens of steps with prompts (``q_len`` 0), recorded in pieces."""
        return self.q_len == 0


@dataclass(frozen=True, slots=True)
class AttnNeeds:
    """Requirements and abilities of a backend, which the engine reads before it builds the KV pool."""

    page_sizes: tuple[int, ...] | None = None  # supported page sizes; None: any
    layout: Literal["NHD", "HND"] = "NHD"  # order of dimensions within a page of the KV pool
    kv_dtypes: tuple[torch.dtype, ...] | None = None  # supported dtypes of the KV pool; None: any
    workspace: int = 0  # bytes of device memory that the backend allocates itself
    phases: frozenset[str] = frozenset({"decode", "extend"})  # "decode": rows of one query token; "extend": prefill
    graph: bool = False  # whether a decode step with this backend can be recorded in a graph and replayed
    shared_prefix: bool = False  # whether decode uses AttnBatch.shared_prefix_len to read a common prefix only once
    device_lengths: bool = False  # whether a recorded decode step may change AttnBatch.seq_lens without a new plan
    refuse: str = ""  # why the backend cannot run on this machine; "": it can


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Parameters of one attention layer. Head counts are those of this tensor-parallel rank."""

    index: int
    q_heads: int
    kv_heads: int
    head_dim: int
    scale: float  # factor of the scores q·k
    window: int = -1  # sliding window: number of positions that a query attends to, its own included; -1: no window
    soft_cap: float = 0.0  # a score s becomes soft_cap · tanh(s / soft_cap); 0: no cap


@dataclass(frozen=True, slots=True)
class AttnBatch:
    """Rows of one step, as attention backends get them. Rows ``[:num_decode]`` have one query token (decode).

    The other rows have any number of query tokens, at least one: first the rows that verify draft tokens, then prefill
    chunks. Backends compute both alike. The queries of row r are the last ``cu_seqlens_q[r+1] - cu_seqlens_q[r]``
    positions of its ``seq_lens[r]`` positions. The KV of all these positions is in the pages listed in
    ``page_table[req_pool_indices[r]]``. The attention layer stores the KV of the query tokens before it calls
    ``forward``.
    """

    num_decode: int
    cu_seqlens_q_cpu: I32  # [rows + 1] first query token of each row; last entry: number of all query tokens
    seq_lens_cpu: I32  # [rows] number of positions, this step's included
    cu_seqlens_q: Tensor  # cu_seqlens_q_cpu on the device, int32
    seq_lens: Tensor  # seq_lens_cpu on the device, int32
    req_pool_indices: Tensor  # [rows] int32: each row's row of the page table
    page_table: Tensor  # [max_running_requests + 1, max_pages] int32: page numbers; the last row is the scratch row
    graph_key: GraphKey | None = None  # if set, the tensors above are the static buffers of this bucket
    shared_prefix_len: Tensor | None = None
    """[1] int32: number of leading positions that have the same pages in all decode rows. None if there is no such
    prefix or it is too short to be worth a separate pass."""

    def slice_rows(self, first: int, last: int) -> AttnBatch:
        """Return rows ``first`` to ``last`` (exclusive) as a batch of their own. No KV or page table is copied."""
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
    """Attention over KV pages. One object serves all layers of one engine."""

    def needs(self) -> AttnNeeds:
        """Return the backend's requirements. The engine calls it first, before the KV pool exists."""

    def bind(self, pool: KVPool, layers: Sequence[LayerSpec], keys: Sequence[GraphKey]) -> None:
        """Store the KV pool and the layers. ``keys`` are the decode buckets that the graph runner will record.

        The engine calls it once, after ``needs`` and before the first ``plan``. Raises `ConfigError` for layers that
        the backend cannot compute.
        """

    def plan(self, batch: AttnBatch) -> None:
        """Prepare the step: compute everything that is the same in all layers. Called once per step."""

    def forward(self, layer: LayerSpec, q: Tensor, out: Tensor) -> Tensor:
        """Compute attention of ``q`` for one layer, write it to ``out`` and return ``out``.

        ``q`` and ``out`` are [tokens, q_heads, head_dim]. The KV of this layer's tokens has been stored already.
        """


@runtime_checkable
class ProjectedDecode(Protocol):
    """An optional ability of a backend: decode attention from the result of the QKV projection.

    QK-norm, RoPE, the KV store and attention are then one call, which can be one launch.
    """

    def serves_projected(self, layer: LayerSpec, rows: int) -> bool:
        """Return whether `forward_projected` can compute ``rows`` rows of the planned step in this layer.

        It can only if all rows decode one token.
        """
        ...

    def forward_projected(
        self, layer: LayerSpec, qkv: Tensor, norm: QKNorm | None, cos_sin: Tensor, out_cache_loc: Tensor, out: Tensor
    ) -> None:
        """Store the rows' keys and values in the pool, and write their attention to ``out``.

        ``qkv`` is [rows, (q_heads + 2·kv_heads)·head_dim], ``out`` [rows, q_heads, head_dim]. See
        `minisgl.plugins.kernels.ops.rope.norm_rope_store` for the other arguments.
        """
        ...


@runtime_checkable
class QuantizedAttention(Protocol):
    """An optional ability of a backend: the launch that writes the result also quantises it, for an FP8 product."""

    def serves_quantized(self, layer: LayerSpec, rows: int) -> bool:
        """Return whether `forward_quantized` can compute the ``rows`` rows of the planned step in this layer."""
        ...

    def forward_quantized(self, layer: LayerSpec, q: Tensor, out: QuantizedRows) -> None:
        """Compute attention as `AttentionBackend.forward` does, and quantise the result into ``out``.

        ``q`` is [rows, q_heads, head_dim], and ``out`` has q_heads·head_dim columns. The result is rounded to q's dtype
        before it is quantised.
        """
        ...


def projected_decode(backend: Any) -> ProjectedDecode | None:
    """Return ``backend``, or the backend that it wraps, if it has the ability `ProjectedDecode`, else None."""
    found: ProjectedDecode | None = _with_ability(backend, ProjectedDecode)
    return found


def quantized_attention(backend: Any) -> QuantizedAttention | None:
    """Return ``backend``, or the backend that it wraps, if it has the ability `QuantizedAttention`, else None."""
    found: QuantizedAttention | None = _with_ability(backend, QuantizedAttention)
    return found


def _with_ability(backend: Any, ability: Any) -> Any:
    """Return the first backend with the ability, or None. A wrapper has the wrapped one as attribute ``backend``."""
    while not isinstance(backend, ability):
        backend = getattr(backend, "backend", None)
        if backend is None:
            return None
    return backend
