"""Lab paged: Scattered pages, the same answer.

Grade it:  python -m minisgl.lab test paged     (`hint paged` for a hint)
Serve it:  python -m minisgl plugins=my_paged.py attention=mine
"""

# minisgl lab paged, skeleton 5b5685a68a (minisgl 0.2.0)

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from minisgl.attention import AttentionBackend, AttnBatch, AttnNeeds, LayerSpec
from minisgl.hooks import hookimpl


@dataclass
class Mine:
    """Attention over pages row by row: gather, mask, softmax. Short enough to read, slower than attention=torch."""

    def build(self) -> MyAttention:
        return MyAttention()


class Row(NamedTuple):
    """One row of a step. Its queries are ``q[first:last]``."""

    first: int
    last: int
    kv_locations: torch.Tensor  # [length] int64: page · page_size + offset in the KV pool of positions 0, 1, …


class MyAttention(AttentionBackend):
    """Backend of attention=paged; `minisgl.attention.AttentionBackend` documents the methods.

    ``positions_read`` counts the positions whose keys and values were gathered, summed over all layers.
    ``positions_padded`` counts the positions that would have been gathered, also summed over all layers, if each row
    were padded to the longest row of its step.
    """

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.positions_read = self.positions_padded = 0

    def needs(self) -> AttnNeeds:
        return AttnNeeds()

    def plan(self, batch: AttnBatch) -> None:
        """Compute the KV locations of each row, which are the same in all layers."""
        ends = batch.cu_seqlens_q_cpu.tolist()
        lengths = batch.seq_lens_cpu.tolist()
        self.rows = [
            Row(ends[r], ends[r + 1], self.kv_locations(batch.page_table[batch.req_pool_indices[r]], length))
            for r, length in enumerate(lengths)
        ]
        self.padded = len(lengths) * max(lengths)

    def forward(self, layer: LayerSpec, q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Compute attention row by row and write ``out``.

        ``q`` and ``out`` are [tokens, q_heads, head_dim]. ``out`` is contiguous; ``q`` may be a view of a wider one.
        """
        self.positions_padded += self.padded
        for row in self.rows:
            k, v = self.gather(layer, row)
            self.positions_read += len(k)
            out[row.first : row.last] = self.attend_row(layer, q[row.first : row.last], k, v)
        return out

    def kv_locations(self, pages: torch.Tensor, length: int) -> torch.Tensor:
        """Return the KV locations of positions 0 to ``length - 1``, int64 [length], on the device of ``pages``.

        A KV location is page · page_size + offset. ``pages`` is the request's row of the page table: its entry i is the
        page of positions i · page_size to (i + 1) · page_size - 1. Entries after the request's last page are undefined:
        each may be any int32.
        """
        # TODO paged.gather
        # 1. Queries read all positions, including a cached prefix and earlier chunks, which this step does not compute.
        # 2. The last page is rarely full. Behind the row's length, it may hold stale KV of another request.
        raise NotImplementedError

    def gather(self, layer: LayerSpec, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row's keys and values in the order of positions, each [length, kv_heads, head_dim]."""
        # TODO paged.gather
        # 3. Flatten the pool's [pages, page_size, kv_heads, head_dim] to [locations, …]: one index gathers everything.
        raise NotImplementedError

    def attention_mask(self, queries: int, length: int, window: int, device: torch.device) -> torch.Tensor:
        """Return which of ``length`` positions each of ``queries`` queries attends to, bool [queries, length].

        ``window`` is the number of positions that a query attends to, its own included, at least 1. With -1, a query
        attends to its own and to all earlier positions.
        """
        # TODO paged.mask
        # 1. The queries are the last positions of the row, so the causal triangle ends in the bottom right corner.
        # 2. A query attends to its own position and to earlier ones.
        raise NotImplementedError

    def attend_row(self, layer: LayerSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Compute attention of q [queries, q_heads, head_dim] over k, v [length, kv_heads, head_dim].

        The result has the shape of q and any floating-point dtype. The arguments must not change; q need not be
        contiguous. A score is q·k times the scale of the layer. The layer's soft cap applies to the scores before the
        mask.
        """
        # TODO paged.attend
        # 1. Consecutive query heads share a KV head. With groups of 2, query heads 0 and 1 use KV head 0, and so on.
        # 2. Multiply the scores by the scale of the layer, then apply its soft cap, if it has one.
        # 3. Masked positions get weight 0: set their scores to minus infinity before the softmax, not to 0 after it.
        # 4. Compute in float32, whatever the dtype of the pool: sums over a long context need the precision.
        raise NotImplementedError

    def metrics(self) -> str:
        """Return the counts in Prometheus' text format."""
        counts = {"read": self.positions_read, "padded": self.positions_padded}
        return "".join(
            f"# TYPE minisgl_paged_positions_{name} counter\nminisgl_paged_positions_{name}_total {count}\n"
            for name, count in counts.items()
        )


@hookimpl
def minisgl_configs() -> Iterator[tuple[str, str, type]]:
    yield "attention", "mine", Mine
