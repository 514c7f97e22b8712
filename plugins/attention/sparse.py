"""`attention=sparse`: decode on a CPU that reads keys and values where they lie in their pages, without a gather.

A decode row's scores are a product of two dense matrices, wanted only where the row's page table says so: a sampled
product (SDDMM). Its output is a sum of the values of a bag of positions, weighted: torch's embedding bag. Each byte of
KV is read once, and on a CPU that is what decode costs. Prefill chunks go to another backend.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from minisgl.attention import AttentionBackend, AttnBatch, AttnNeeds, GraphKey, LayerSpec
from minisgl.hooks import hookimpl
from minisgl.kernel.launch import one_launch

if TYPE_CHECKING:
    from minisgl.kvcache.pool import KVPool

MOST = 1 << 22
"""Scores computed in one call: about 80 MiB of indices and weights."""
PADDING = 4096
"""Scores of padding that cost about as much as another call."""


@dataclass
class Sparse:
    """Decode rows read their pages in place: for a CPU, in float32."""

    prefill: str = "torch"
    """Name of the backend for prefill chunks."""


class Group(NamedTuple):
    """Rows of similar length, padded to the longest's. A bag is one query head of one row."""

    scores: torch.Tensor  # sparse CSR [bags, positions in the pool · kv_heads]: where keys are wanted
    reads: torch.Tensor  # [bags · length] the same positions, bag after bag
    ends: torch.Tensor  # [bags + 1] where each bag's positions end
    padding: torch.Tensor | None  # [bags, length] bool; None: all rows are equally long


class Plan(NamedTuple):
    """One step, for all layers with the same window: ``order`` [decode rows] says which row is in which place."""

    order: torch.Tensor
    groups: list[Group]


class SparseAttention:
    """See `minisgl.attention.AttentionBackend` for what is asked for and when."""

    def __init__(self, prefill: AttentionBackend, device: torch.device):
        self.prefill, self.device = prefill, device
        self.plans: dict[int, Plan] = {}  # by window
        self.decode = self.rows = 0

    def needs(self) -> AttnNeeds:
        prefill = self.prefill.needs()
        refuse = "" if self.device.type == "cpu" else "it is for CPUs; use attention=auto."
        if prefill.layout != "NHD":
            refuse = f"its prefill backend wants {prefill.layout} pages, it needs NHD."
        return AttnNeeds(
            prefill.page_sizes,
            kv_dtypes=(torch.float32,),
            workspace=prefill.workspace,
            graph=True,
            refuse=refuse or prefill.refuse,
        )

    def bind(self, pool: KVPool, layers: Sequence[LayerSpec], keys: Sequence[GraphKey]) -> None:
        self.prefill.bind(pool, layers, ())
        self.page_size = pool.page_size
        self.heads = {layer.window: (layer.q_heads, layer.kv_heads) for layer in layers}
        # [pages · page_size · kv_heads, head_dim]: one row for each position and kv head.
        self.flat = {layer.index: [x.flatten(0, 2) for x in pool.layer(layer.index)] for layer in layers}
        self.positions = len(self.flat[layers[0].index][0])

    def plan(self, batch: AttnBatch) -> None:
        """Find for each decode row which rows of the flat pool it reads."""
        self.decode, self.rows = batch.num_decode, len(batch.seq_lens_cpu)
        if self.decode < self.rows:
            self.prefill.plan(batch.slice_rows(self.decode, self.rows))
        if self.decode:
            self.plans = {window: self._plan_window(batch, window) for window in self.heads}

    def _plan_window(self, batch: AttnBatch, window: int) -> Plan:
        q_heads, kv_heads = self.heads[window]
        seen = batch.seq_lens_cpu[: self.decode].astype(np.int64)
        if window >= 0:
            seen = np.minimum(seen, window)
        by_length = np.argsort(-seen, kind="stable")
        seen = seen[by_length]
        order, counts = torch.from_numpy(by_length), torch.from_numpy(seen)[:, None]
        # Padding reads the row's own last position again: a neighbour's NaN must not leak in as 0 * NaN.
        end = batch.seq_lens.index_select(0, order).long()[:, None]
        place = torch.arange(int(seen[0]))
        at = torch.minimum(end - counts + place, end - 1)
        column = torch.div(at, self.page_size, rounding_mode="floor")
        slots = batch.req_pool_indices.index_select(0, order).long()[:, None]
        where = batch.page_table[slots, column].long() * self.page_size + (at - column * self.page_size)
        reads = where[:, None] * kv_heads + (torch.arange(q_heads) // (q_heads // kv_heads))[:, None]
        groups = []
        for a, b in _cut(seen, q_heads):
            length, bags = int(seen[a]), (b - a) * q_heads
            own = reads[a:b, :, :length].flatten()
            ends = torch.arange(bags + 1) * length
            padding = None
            if seen[b - 1] < length:
                padding = (place[:length] >= counts[a:b]).repeat_interleave(q_heads, 0)
            groups.append(Group(_csr(ends, own, self.positions), own, ends, padding))
        return Plan(order, groups)

    @one_launch
    def forward(self, layer: LayerSpec, q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """q, out [tokens, q_heads, head_dim]."""
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
        """bags [bags, head_dim] → [bags, head_dim]."""
        keys, values = self.flat[layer.index]
        # Written over the scores of the layer before, which beta=0 multiplies away.
        torch.sparse.sampled_addmm(group.scores, bags, keys.t(), beta=0.0, alpha=layer.scale, out=group.scores)
        scores = group.scores.values().view(len(bags), -1)
        if layer.soft_cap:
            scores = (scores / layer.soft_cap).tanh_().mul_(layer.soft_cap)
        if group.padding is not None:
            scores = scores.masked_fill(group.padding, -torch.inf)
        return torch.nn.functional.embedding_bag(
            group.reads,
            values,
            group.ends,
            mode="sum",
            per_sample_weights=scores.softmax(1).flatten(),
            include_last_offset=True,
        )


def _cut(lengths: np.ndarray, q_heads: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows, whose ``lengths`` fall: a range ends where its padding would cost more than another range."""
    a = 0
    while a < len(lengths):
        fit = max(1, MOST // (int(lengths[a]) * q_heads))
        padding = np.cumsum(lengths[a] - lengths[a : a + fit]) * q_heads
        b = a + int(np.count_nonzero(padding <= PADDING))
        yield a, b
        a = b


def _csr(ends: torch.Tensor, reads: torch.Tensor, columns: int) -> torch.Tensor:
    """A sparse matrix of zeros with the rows that ``ends`` delimits in ``reads``, which need not be sorted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
        return torch.sparse_csr_tensor(
            ends, reads, torch.zeros(len(reads)), size=(len(ends) - 1, columns), check_invariants=False
        )


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "attention", "sparse", Sparse


@hookimpl
def minisgl_attention(
    config: Any, device: torch.device, build: Callable[[str], AttentionBackend]
) -> SparseAttention | None:
    return SparseAttention(build(config.prefill), device) if isinstance(config, Sparse) else None
