"""Attention between the projections of a layer: QK-norm, RoPE, the KV store, and attention over KV pages.

`AttentionBackend` computes the first three in plain torch. Backends are plugins, which compute the last one, and which
may fuse it with the others: `plugins/attention/` has `paged.py`, `torch.py`, `triton.py`, `flashinfer.py` … This module
knows none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from minisgl.core import I32, KVGroup

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.kvcache.pool import KVPool

__all__ = ["AttentionBackend", "AttnBatch", "AttnNeeds", "GraphKey", "LayerSpec", "QKNorm", "rotate"]


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
    shared_prefix: bool = False
    """Whether decode uses `AttnBatch.shared_prefix_len` to read a common prefix only once. The plugin must also find
    such prefixes, with `minisgl.plugins.kernels.attention.shared_prefix`."""
    device_lengths: bool = False  # whether a recorded decode step may change AttnBatch.seq_lens without a new plan
    fused_rows: int = 0
    """Up to this number of decode rows, `attend` may read and store KV in one launch. No row of such a step may read
    what another row of it stores, so all rows must be of different requests."""
    sinks: bool = False  # whether the backend computes `LayerSpec.sinks`; a model that has some is refused if not
    groups: bool = False  # whether a layer with a window reads no page behind it: such pages may be another request's
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
    sinks: Tensor | None = field(default=None, compare=False, repr=False)
    """[q_heads] the score of each head's attention sink, or None: one more summand exp(sink) of the softmax's
    denominator, to which no value belongs. So the weights of a head may sum to less than 1 (gpt-oss, 2025; Xiao et al.,
    StreamingLLM, 2023). A model's parameter, in any dtype, filled when the weights are loaded."""


@dataclass(frozen=True, slots=True)
class AttnBatch:
    """Rows of one step, as attention backends get them. Rows ``[:num_decode]`` have one query token (decode).

    The other rows have any number of query tokens, at least one: first the rows that verify draft tokens, then prefill
    chunks. Backends compute both alike. The queries of row r are the last ``cu_seqlens_q[r+1] - cu_seqlens_q[r]``
    positions of its ``seq_lens[r]`` positions. The KV of all these positions is in the pages listed in
    ``page_table[req_pool_indices[r]]``. `AttentionBackend.attend` stores the KV of the query tokens.
    On a CPU, ``page_table`` changes after the step.
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


class QKNorm(NamedTuple):
    """The weights and epsilon of the RMSNorm of each query and key head before RoPE; q and k are [head_dim]."""

    q: Tensor
    k: Tensor
    eps: float


class AttentionBackend:
    """The base of attention backends. One object serves all layers of one engine.

    A backend defines `needs`, `plan` and `forward`. It may also override `norm_rope_store`, or `attend` as a whole, to
    compute the same with fewer launches.
    """

    pool: KVPool

    def needs(self) -> AttnNeeds:
        """Return the backend's requirements. The engine calls it first, before the KV pool exists."""
        raise NotImplementedError

    def group_layers(self, layers: Sequence[LayerSpec]) -> tuple[tuple[KVGroup, ...], int]:
        """Return the KV groups of the layers, and how many layers a page holds. Called before `bind`."""
        return (KVGroup(),), len(layers)

    def bind(self, pool: KVPool, layers: Sequence[LayerSpec], keys: Sequence[GraphKey]) -> None:
        """Store the KV pool as ``self.pool``. ``keys`` are the decode buckets that the graph runner will record.

        The engine calls it once, after ``needs`` and before the first ``plan``. Raises `ConfigError` for layers that
        the backend cannot compute.
        """
        self.pool = pool

    def plan(self, batch: AttnBatch) -> None:
        """Prepare the step: compute everything that is the same in all layers. Called once per step.

        It runs on the compute stream, and never inside a graph.
        """
        raise NotImplementedError

    def attend(
        self, layer: LayerSpec, qkv: Tensor, norm: QKNorm | None, cos_sin: Tensor, out_cache_loc: Tensor
    ) -> Tensor:
        """Compute attention of one layer from the result of its QKV projection; returns [tokens, q_heads·head_dim].

        The arguments are those of `norm_rope_store`.
        """
        q = self.norm_rope_store(layer, qkv, norm, cos_sin, out_cache_loc)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.forward(layer, q, out)
        return out.flatten(1)

    def norm_rope_store(
        self, layer: LayerSpec, qkv: Tensor, norm: QKNorm | None, cos_sin: Tensor, out_cache_loc: Tensor
    ) -> Tensor:
        """Normalise and rotate queries and keys, store keys and values in the pool, and return the queries.

        qkv [tokens, (q_heads + 2·kv_heads)·head_dim]; cos_sin [tokens, head_dim] float32; out_cache_loc [tokens] is the
        KV location of each token, page·page_size + offset. ``norm`` None: the model has no QK-norm. Returns [tokens,
        q_heads, head_dim].
        """
        # 1. One token's heads: its queries, then its keys, then its values.
        sizes = (layer.q_heads, layer.kv_heads, layer.kv_heads)
        q, k, v = qkv.view(len(qkv), sum(sizes), layer.head_dim).split(sizes, dim=1)
        # 2. Normalise each head of queries and keys alone (Qwen3).
        if norm is not None:
            rms_norm = torch.nn.functional.rms_norm
            q, k = rms_norm(q, norm.q.shape, norm.q, norm.eps), rms_norm(k, norm.k.shape, norm.k, norm.eps)
        # 3. Rotate both by the angles of the token's position. Keys are stored rotated: their positions never change.
        q, k = rotate(q, cos_sin), rotate(k, cos_sin)
        # 4. From here on, attention finds this token's key and value through the page table.
        self.pool.store(layer.index, k, v, out_cache_loc)
        return q

    def forward(self, layer: LayerSpec, q: Tensor, out: Tensor) -> Tensor:
        """Compute attention of ``q`` for one layer, write it to ``out`` and return ``out``.

        ``q`` and ``out`` are [tokens, q_heads, head_dim]. The KV of this layer's tokens has been stored already.
        """
        raise NotImplementedError


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Apply RoPE to x [tokens, heads, head_dim]; cos_sin [tokens, head_dim] is float32, cosines first.

    Dimension i is rotated together with dimension i + head_dim/2, as in Hugging Face's checkpoints. Su et al.,
    RoFormer, 2021.
    """
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    wide = x.float()
    x1, x2 = wide.chunk(2, dim=-1)
    out = torch.empty_like(wide)
    o1, o2 = out.chunk(2, dim=-1)
    torch.mul(x1, cos, out=o1).addcmul_(x2, sin, value=-1)
    torch.mul(x2, cos, out=o2).addcmul_(x1, sin)
    return out.to(x.dtype)
