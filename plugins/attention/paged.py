"""`attention=paged`: attention over pages, one row after another, in plain tensor operations. To read, not to race.

PagedAttention (arXiv:2309.06180): a request's keys and values lie in pages anywhere in the pool, and its row of the
page table says where. Faster backends do the same without the gather, and many rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from minisgl.attention import AttentionBackend, AttnBatch, AttnNeeds, GraphKey, LayerSpec
from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from minisgl.kvcache.pool import KVPool


@dataclass
class Paged:
    """Gather, mask, softmax over pages, row by row: short enough to read, slower than torch."""


class Row(NamedTuple):
    """One row of a step: its queries are ``q[first:last]``."""

    first: int
    last: int
    places: torch.Tensor  # [length] int64: where its positions 0, 1, … lie in the pool, page · page_size + offset


class PagedAttention:
    """See `minisgl.attention.AttentionBackend` for what is asked for and when. ``positions_read`` counts the positions
    whose keys and values were gathered, over all layers; ``positions_padded`` those that rows padded to the longest
    would have taken."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.positions_read = self.positions_padded = 0

    def needs(self) -> AttnNeeds:
        return AttnNeeds()

    def bind(self, pool: KVPool, layers: Sequence[LayerSpec], keys: Sequence[GraphKey]) -> None:
        self.pool = pool

    def plan(self, batch: AttnBatch) -> None:
        """Find where each row's keys and values lie: the same in all layers."""
        ends = batch.cu_seqlens_q_cpu.tolist()
        lengths = batch.seq_lens_cpu.tolist()
        self.rows = [
            Row(ends[r], ends[r + 1], self.places(batch.page_table[batch.req_pool_indices[r]], length))
            for r, length in enumerate(lengths)
        ]
        self.padded = len(lengths) * max(lengths)

    def forward(self, layer: LayerSpec, q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """q, out [tokens, q_heads, head_dim]; writes ``out`` and returns it."""
        self.positions_padded += self.padded
        for row in self.rows:
            k, v = self.gather(layer, row)
            self.positions_read += len(k)
            out[row.first : row.last] = self.attend(layer, q[row.first : row.last], k, v)
        return out

    # lab: paged.gather
    def places(self, pages: torch.Tensor, length: int) -> torch.Tensor:
        """Where positions 0 … length-1 lie, [length] int64. ``pages`` is the row of the page table: page i holds
        positions i · page_size and following; beyond the request's last page it says nothing."""
        # 1. All positions count, also those that the prefix cache spared and this step does not compute.
        position = torch.arange(length, device=pages.device)
        # 2. The last page is rarely full: what lies behind the length is another request's leftover.
        size = self.pool.page_size
        return pages[position // size].long() * size + position % size

    def gather(self, layer: LayerSpec, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        """The row's keys and values in order, each [length, kv_heads, head_dim]."""
        # 3. The pool's buffers are [pages, page_size, kv_heads, head_dim]: as [places, …], one index finds all.
        keys, values = self.pool.layer(layer.index)
        return keys.flatten(0, 1)[row.places], values.flatten(0, 1)[row.places]

    # lab: end

    # lab: paged.mask
    def seen(self, queries: int, length: int, window: int, device: torch.device) -> torch.Tensor:
        """Which of ``length`` positions each of ``queries`` queries sees, bool [queries, length]. ``window``: how many
        positions a query sees, its own included; -1: all."""
        key = torch.arange(length, device=device)
        # 1. The queries are the last positions of the row: the mask's corner is at the bottom right.
        query = key[length - queries :, None]
        # 2. A query sees itself and what came before.
        seen = key <= query
        if window >= 0:
            seen &= key > query - window
        return seen

    # lab: end

    # lab: paged.attend
    def attend(self, layer: LayerSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of q [queries, q_heads, head_dim] over k, v [length, kv_heads, head_dim]; returns q's shape."""
        # 1. Query heads stand in groups that share a key-value head: 0 and 1 the first, 2 and 3 the second, and so on.
        group = layer.q_heads // layer.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * layer.scale
        if layer.soft_cap:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        # 2. What is not seen gets no weight: minus infinity before the softmax, not zero after it.
        seen = self.seen(len(q), len(k), layer.window, q.device)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        # 3. In float32 until here, whatever the pool holds: sums over a long context need the digits.
        return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)

    # lab: end


@hookimpl
def minisgl_configs() -> Iterator[tuple[str, str, type]]:
    yield "attention", "paged", Paged


class Plugin:
    """Makes the backends of one engine, and tells what they read."""

    def __init__(self) -> None:
        self.backends: list[PagedAttention] = []

    @hookimpl
    def minisgl_attention(self, config: Any) -> AttentionBackend | None:
        if not isinstance(config, Paged):
            return None
        self.backends.append(PagedAttention())
        return self.backends[-1]

    @hookimpl
    def minisgl_metrics(self) -> str:
        counts = {
            "read": sum(backend.positions_read for backend in self.backends),
            "padded": sum(backend.positions_padded for backend in self.backends),
        }
        lines = [f"# TYPE minisgl_paged_positions_{name} counter" for name in counts]
        values = [f"minisgl_paged_positions_{name}_total {count}" for name, count in counts.items()]
        return "".join(f"{line}\n{value}\n" for line, value in zip(lines, values, strict=True)) if self.backends else ""
