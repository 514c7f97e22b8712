"""`attention=sparse`: decode attention on a CPU that reads keys and values in place, without gathering the pages.

The scores of a decode row are entries of the product of two dense matrices, queries and all keys of the pool. Only the
entries at the row's own KV locations are needed: a sampled dense-dense product (SDDMM). The output is a weighted sum of
the values at these locations: torch's embedding bag. So each byte of KV is read once; on a CPU, reading KV is most of
the cost of decode attention. Prefill chunks are computed by another backend.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from minisgl.attention import AttentionBackend, AttnBatch, AttnNeeds, GraphKey, LayerSpec
from minisgl.hooks import hookimpl
from minisgl.plugins.attention import slice_rows
from minisgl.utils.launch import one_launch

if TYPE_CHECKING:
    from minisgl.kvcache.pool import KVPool

MAX_SCORES = 1 << 22
"""Largest number of scores computed in one call. That number takes about 80 MiB of indices and weights."""
MAX_PADDING = 4096
"""Largest number of padding scores in one call. That number costs about as much time as another call."""


@dataclass
class Sparse:
    """Decode attention that reads KV pages in place. CPU and float32 only."""

    prefill: str = "torch"
    """Name of the backend for prefill chunks."""

    def build(self, device: torch.device, build_other: Callable[[str], AttentionBackend]) -> SparseAttention:
        return SparseAttention(build_other(self.prefill), device)


class Group(NamedTuple):
    """Decode rows of similar length, padded to the longest of them. A bag is one query head of one row.

    The flat pool has one entry for each KV location and KV head: entry = KV location · kv_heads + KV head.
    """

    scores: torch.Tensor  # sparse CSR [bags, entries of the flat pool]: one score for each entry that a bag reads
    reads: torch.Tensor  # [bags · length] the entries that each bag reads, bag after bag
    ends: torch.Tensor  # [bags + 1] offsets of the bags in `reads`
    # [bags, length] bool: which reads are padding. A bag is one query head of one row. None: all rows of the group
    # have the same length.
    padding: torch.Tensor | None


class Plan(NamedTuple):
    """Plan of one step's decode rows, for all layers with the same window."""

    order: torch.Tensor  # [decode rows] row numbers sorted by length, longest first, as the groups have them
    groups: list[Group]


class SparseAttention(AttentionBackend):
    """Backend of attention=sparse; `minisgl.attention.AttentionBackend` documents the methods.

    ``prefill`` is the backend for prefill chunks.
    """

    def __init__(self, prefill: AttentionBackend, device: torch.device):
        self.prefill, self.device = prefill, device
        self.plans: dict[int, Plan] = {}  # by window
        self.decode = self.rows = 0

    def needs(self) -> AttnNeeds:
        prefill = self.prefill.needs()
        refuse = "" if self.device.type == "cpu" else "it runs on CPUs only; use attention=auto."
        if prefill.layout != "NHD":
            refuse = f"its prefill backend needs {prefill.layout} pages, but attention=sparse needs NHD pages."
        return AttnNeeds(
            prefill.page_sizes,
            kv_dtypes=(torch.float32,),
            workspace=prefill.workspace,
            graph=True,
            sinks=prefill.sinks,
            groups=prefill.groups,
            refuse=refuse or prefill.refuse,
        )

    def bind(self, pool: KVPool, layers: Sequence[LayerSpec], keys: Sequence[GraphKey]) -> None:
        super().bind(pool, layers, keys)
        self.prefill.bind(pool, layers, ())
        self.page_size = pool.page_size
        self.heads = {layer.window: (layer.q_heads, layer.kv_heads) for layer in layers}
        # Keys and values as [pages · page_size · kv_heads, head_dim]: one entry for each KV location and KV head.
        self.flat = {layer.index: [x.flatten(0, 2) for x in pool.layer(layer.index)] for layer in layers}
        self.num_entries = len(self.flat[layers[0].index][0])

    def plan(self, batch: AttnBatch) -> None:
        """Plan the prefill chunks on the prefill backend, and list the flat-pool entries that each decode row reads."""
        self.decode, self.rows = batch.num_decode, len(batch.seq_lens_cpu)
        if self.decode < self.rows:
            self.prefill.plan(slice_rows(batch, self.decode, self.rows))
        if self.decode:
            self.plans = {window: self._plan_window(batch, window) for window in self.heads}

    def _plan_window(self, batch: AttnBatch, window: int) -> Plan:
        q_heads, kv_heads = self.heads[window]
        # Number of positions that each row attends to.
        lengths = batch.seq_lens_cpu[: self.decode].astype(np.int64)
        if window >= 0:
            lengths = np.minimum(lengths, window)
        by_length = np.argsort(-lengths, kind="stable")
        lengths = lengths[by_length]
        order, counts = torch.from_numpy(by_length), torch.from_numpy(lengths)[:, None]
        # Padding reads the row's own last position again. The KV of another request could be NaN, and 0 · NaN is NaN.
        end = batch.seq_lens.index_select(0, order).long()[:, None]
        index = torch.arange(int(lengths[0]))
        positions = torch.minimum(end - counts + index, end - 1)
        column = torch.div(positions, self.page_size, rounding_mode="floor")
        req_pool_indices = batch.req_pool_indices.index_select(0, order).long()[:, None]
        pages = batch.page_table[req_pool_indices, column].long()
        kv_locations = pages * self.page_size + (positions - column * self.page_size)
        reads = kv_locations[:, None] * kv_heads + (torch.arange(q_heads) // (q_heads // kv_heads))[:, None]
        groups = []
        for a, b in _split_rows(lengths, q_heads):
            length, bags = int(lengths[a]), (b - a) * q_heads
            group_reads = reads[a:b, :, :length].flatten()
            ends = torch.arange(bags + 1) * length
            padding = None
            if lengths[b - 1] < length:
                padding = (index[:length] >= counts[a:b]).repeat_interleave(q_heads, 0)
            groups.append(Group(_csr(ends, group_reads, self.num_entries), group_reads, ends, padding))
        return Plan(order, groups)

    @one_launch
    def forward(self, layer: LayerSpec, q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Compute the decode rows and the prefill chunks. ``q`` and ``out`` are [tokens, q_heads, head_dim]."""
        if self.decode:
            order, groups = self.plans[layer.window]
            bags = q.index_select(0, order).flatten(0, 1)
            done, a = [], 0
            for group in groups:
                b = a + len(group.ends) - 1
                done.append(self._attend(layer, bags[a:b], group))
                a = b
            y = torch.cat(done) if len(done) > 1 else done[0]
            out.index_copy_(0, order, y.view(-1, layer.q_heads, layer.head_dim))
        if self.decode < self.rows:
            self.prefill.forward(layer, q[self.decode :], out[self.decode :])
        return out

    def _attend(self, layer: LayerSpec, bags: torch.Tensor, group: Group) -> torch.Tensor:
        """Compute attention of one group: queries ``bags`` [bags, head_dim] to outputs of the same shape."""
        keys, values = self.flat[layer.index]
        # Overwrite the scores of the previous layer: beta=0 ignores them.
        torch.sparse.sampled_addmm(group.scores, bags, keys.t(), beta=0.0, alpha=layer.scale, out=group.scores)
        scores = group.scores.values().view(len(bags), -1)
        if layer.soft_cap:
            scores = (scores / layer.soft_cap).tanh_().mul_(layer.soft_cap)
        if group.padding is not None:
            scores = scores.masked_fill(group.padding, -torch.inf)
        weights = scores.softmax(1)
        if layer.sinks is not None:  # their part of the softmax belongs to no value: the weights sum to less than 1
            sinks = layer.sinks.float().repeat(len(bags) // layer.q_heads)
            weights = weights * (scores.logsumexp(1) - sinks).sigmoid().unsqueeze(1)
        return torch.nn.functional.embedding_bag(
            group.reads,
            values,
            group.ends,
            mode="sum",
            per_sample_weights=weights.flatten(),
            include_last_offset=True,
        )


def _split_rows(lengths: np.ndarray, q_heads: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows to compute in one call. ``lengths`` of the rows are sorted, longest first.

    A range has at most `MAX_SCORES` scores (but at least one row), and at most `MAX_PADDING` scores of padding.
    """
    a = 0
    while a < len(lengths):
        max_rows = max(1, MAX_SCORES // (int(lengths[a]) * q_heads))
        padding = np.cumsum(lengths[a] - lengths[a : a + max_rows]) * q_heads
        b = a + int(np.count_nonzero(padding <= MAX_PADDING))
        yield a, b
        a = b


def _csr(ends: torch.Tensor, reads: torch.Tensor, columns: int) -> torch.Tensor:
    """Return a sparse CSR matrix of zeros with row offsets ``ends`` and column indices ``reads`` (in any order)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
        return torch.sparse_csr_tensor(
            ends, reads, torch.zeros(len(reads)), size=(len(ends) - 1, columns), check_invariants=False
        )


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "attention", "sparse", Sparse
