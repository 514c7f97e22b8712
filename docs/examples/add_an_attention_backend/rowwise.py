"""attention=rowwise: paged attention one request at a time, in plain torch. Written to be read, not to be fast."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch

from minisgl.attention import AttentionBackend, AttnBatch, AttnNeeds, LayerSpec
from minisgl.hooks import hookimpl


@dataclass
class Rowwise:
    """Plain torch, one request at a time: any device, page size, dtype, window and soft cap."""

    upcast: bool = True
    """Compute scores and the softmax in float32, whatever the model's dtype."""

    def build(self) -> AttentionBackend:
        return RowwiseAttention(self)


class RowwiseAttention(AttentionBackend):
    """The engine calls needs and bind once, plan once a step, and forward, through attend, once a step and layer."""

    def __init__(self, config: Rowwise):
        self.upcast = config.upcast

    def needs(self) -> AttnNeeds:
        """Ask for nothing: pages of any size, KV of any dtype in NHD layout, decode and prefill rows, no graphs."""
        return AttnNeeds()

    def plan(self, batch: AttnBatch) -> None:
        """Find each row's queries and pages, once for all layers."""
        ends = batch.cu_seqlens_q_cpu.tolist()
        self.rows = []
        for row, (begin, end) in enumerate(pairwise(ends)):
            length = int(batch.seq_lens_cpu[row])
            num_pages = -(-length // self.pool.page_size)
            pages = batch.page_table[batch.req_pool_indices[row], :num_pages].long()
            self.rows.append((begin, end, length, pages))

    def forward(self, layer: LayerSpec, q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """q, out [tokens, q_heads, head_dim]; fills ``out`` and returns it. The KV of these tokens is stored."""
        keys, values = self.pool.layer(layer.index)  # each [num_pages, page_size, kv_heads, head_dim]
        for begin, end, length, pages in self.rows:
            k, v = (x[pages].flatten(0, 1)[:length] for x in (keys, values))  # [length, kv_heads, head_dim]
            out[begin:end] = self.attend_row(layer, q[begin:end], k, v)
        return out

    def attend_row(self, layer: LayerSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [n, q_heads, head_dim] are the last n of the ``len(k)`` positions. Returns a tensor of q's shape."""
        group = layer.q_heads // layer.kv_heads  # grouped-query attention: this many query heads share a KV head
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        if self.upcast:
            q, k, v = q.float(), k.float(), v.float()
        scores = torch.einsum("nhd,lhd->hnl", q, k) * layer.scale
        if layer.soft_cap:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        key = torch.arange(len(k), device=k.device)
        query = key[len(k) - len(q) :, None]  # position of each query, [n, 1]
        seen = key <= query
        if layer.window >= 0:
            seen &= key > query - layer.window
        return torch.einsum("hnl,lhd->nhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "attention", "rowwise", Rowwise
