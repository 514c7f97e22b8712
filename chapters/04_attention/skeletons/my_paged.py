"""Lab paged: Scattered pages, the same answer.

Grade it:  python -m minisgl.lab test paged     (`hint paged` for a hint)
Serve it:  python -m minisgl plugins=my_paged.py attention=mine
"""

# minisgl lab paged, skeleton aa08eca5c6 (minisgl 0.2.0)

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
class Mine:
    """Gather, mask, softmax over pages, row by row: short enough to read, slower than torch."""


class Row(NamedTuple):
    """One row of a step: its queries are ``q[first:last]``."""

    first: int
    last: int
    places: torch.Tensor  # [length] int64: where its positions 0, 1, … lie in the pool, page · page_size + offset


class MyAttention:
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

    def places(self, pages: torch.Tensor, length: int) -> torch.Tensor:
        """Where positions 0 … length-1 lie, [length] int64. ``pages`` is the row of the page table: page i holds
        positions i · page_size and following; beyond the request's last page it says nothing."""
        # TODO paged.gather
        # 1. All positions count, also those that the prefix cache spared and this step does not compute.
        # 2. The last page is rarely full: what lies behind the length is another request's leftover.
        raise NotImplementedError

    def gather(self, layer: LayerSpec, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        """The row's keys and values in order, each [length, kv_heads, head_dim]."""
        # TODO paged.gather
        # 3. The pool's buffers are [pages, page_size, kv_heads, head_dim]: as [places, …], one index finds all.
        raise NotImplementedError

    def seen(self, queries: int, length: int, window: int, device: torch.device) -> torch.Tensor:
        """Which of ``length`` positions each of ``queries`` queries sees, bool [queries, length]. ``window``: how many
        positions a query sees, its own included; -1: all."""
        # TODO paged.mask
        # 1. The queries are the last positions of the row: the mask's corner is at the bottom right.
        # 2. A query sees itself and what came before.
        raise NotImplementedError

    def attend(self, layer: LayerSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of q [queries, q_heads, head_dim] over k, v [length, kv_heads, head_dim]; returns q's shape."""
        # TODO paged.attend
        # 1. Query heads stand in groups that share a key-value head: 0 and 1 the first, 2 and 3 the second, and so on.
        # 2. What is not seen gets no weight: minus infinity before the softmax, not zero after it.
        # 3. In float32 until here, whatever the pool holds: sums over a long context need the digits.
        raise NotImplementedError


@hookimpl
def minisgl_configs() -> Iterator[tuple[str, str, type]]:
    yield "attention", "mine", Mine


class Plugin:
    """Makes the backends of one engine, and tells what they read."""

    def __init__(self) -> None:
        self.backends: list[MyAttention] = []

    @hookimpl
    def minisgl_attention(self, config: Any) -> AttentionBackend | None:
        if not isinstance(config, Mine):
            return None
        self.backends.append(MyAttention())
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
