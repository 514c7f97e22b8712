"""Attention over pages with torch's scaled_dot_product_attention: the readable reference, on CPU and GPU.

Pages are gathered into a dense tensor before each call. That costs a copy of the KV, so rows of similar length are
gathered together, few enough at a time that on a CPU the copy is still in the cache when attention reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from minisgl.attention import AttentionBackend, AttnBatch, AttnNeeds, GraphKey, LayerSpec
from minisgl.hooks import hookimpl
from minisgl.kernel.launch import one_launch

if TYPE_CHECKING:
    from minisgl.kvcache.pool import KVPool


@dataclass
class Torch:
    """scaled_dot_product_attention over gathered pages: any device, any page size."""

    gather_mb: int | None = None
    """MiB of one layer's KV gathered at a time; by default 2 on a CPU, 512 on a GPU."""
    block: int = 256
    """Queries of a prefill chunk computed at a time: each block reads only the KV before its end."""


class Group(NamedTuple):
    """Blocks of ``q_len`` queries that are computed in one call. Their KV is padded to the same number of pages."""

    tokens: torch.Tensor  # [blocks * q_len] rows of q and out
    pages: torch.Tensor  # [blocks * pages] pool pages
    seen: torch.Tensor  # [blocks, 1, q_len, pages * page_size] bool: which positions each query sees
    q_len: int


class TorchAttention:
    """See `minisgl.attention.AttentionBackend` for what is asked for and when."""

    def __init__(self, config: Torch, device: torch.device):
        self.device, self.block = device, config.block
        self.budget = (config.gather_mb or (2 if device.type == "cpu" else 512)) << 20
        self.groups: dict[int, list[Group]] = {}  # by window

    def needs(self) -> AttnNeeds:
        # On a CPU a planned call counts as one launch; on a GPU its kernels depend on the lengths.
        return AttnNeeds(graph=self.device.type == "cpu")

    def bind(self, pool: KVPool, layers: Sequence[LayerSpec], keys: Sequence[GraphKey]) -> None:
        self.pool = pool
        self.windows = sorted({layer.window for layer in layers})
        self.page_bytes = pool.page_bytes(1, pool.page_size, layers[0].kv_heads, layers[0].head_dim, pool.dtype)

    def plan(self, batch: AttnBatch) -> None:
        """Cut every row into blocks of queries, and find for each window which pages they read, and what they see."""
        q_lens = np.diff(batch.q_indptr_host)
        blocks = -(-q_lens // self.block)
        row = np.repeat(np.arange(len(q_lens)), blocks)
        offset = (np.arange(len(row)) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * self.block
        q_len = np.minimum(q_lens[row] - offset, self.block)
        later = q_lens[row] - offset - q_len  # queries of the row behind this block
        begin = batch.q_indptr_host[row] + offset
        end = batch.kv_len_host[row] - later
        self.groups = {window: self._groups(batch, window, row, q_len, begin, end, later) for window in self.windows}

    def _groups(
        self,
        batch: AttnBatch,
        window: int,
        row: np.ndarray,
        q_len: np.ndarray,
        begin: np.ndarray,
        end: np.ndarray,
        later: np.ndarray,
    ) -> list[Group]:
        page = self.pool.page_size
        first = np.maximum(end - q_len + 1 - window, 0) // page if window >= 0 else np.zeros_like(end)
        pages = -(-end // page) - first
        order = np.lexsort((-pages, q_len))
        upload = np.stack((row, begin, later, first, pages)).astype(np.int64)[:, order]
        on_device = torch.from_numpy(upload).to(self.device, non_blocking=True)
        rows, begins, laters, firsts, counts = on_device.unsqueeze(2)  # each [blocks, 1]
        column = torch.arange(int(pages.max()), device=self.device)
        # Padding reads the block's own last page again: a neighbour's NaN must not leak in as 0 * NaN.
        table = batch.table[batch.slots[rows].long(), firsts + torch.minimum(column, counts - 1)]
        last = batch.kv_len[rows] - laters - 1  # position of the block's last query
        groups = []
        for a, b in self._cut(q_len[order], pages[order]):
            queries, width = int(q_len[order[a]]), int(pages[order[a]])
            ahead = torch.arange(queries, device=self.device)
            position = (last[a:b] - (queries - 1) + ahead).unsqueeze(2)
            key = (firsts[a:b] * page + torch.arange(width * page, device=self.device)).unsqueeze(1)
            seen = key <= position
            if window >= 0:
                seen &= key > position - window
            tokens = (begins[a:b] + ahead).flatten()
            groups.append(Group(tokens, table[a:b, :width].flatten(), seen.unsqueeze(1), queries))
        return groups

    def _cut(self, q_len: np.ndarray, pages: np.ndarray) -> list[tuple[int, int]]:
        """Ranges of blocks with the same q_len whose gathered KV fits the budget and is at most half padding.
        Within a q_len, ``pages`` falls."""
        ranges, a = [], 0
        while a < len(pages):
            fit = max(1, self.budget // int(pages[a] * self.page_bytes))
            same = q_len[a : a + fit] == q_len[a]
            alike = pages[a : a + fit] * 2 > pages[a]
            b = a + int(np.argmin(np.append(same & alike, False)))
            ranges.append((a, b))
            a = b
        return ranges

    @one_launch
    def forward(self, layer: LayerSpec, q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        keys, values = self.pool.layer(layer.index)
        shape = (layer.kv_heads, layer.q_heads // layer.kv_heads, layer.head_dim)
        for group in self.groups[layer.window]:
            blocks = group.seen.shape[0]
            # Query heads that share a kv head stand beside the queries: [blocks, kv_heads, group * q_len, head_dim].
            x = q.index_select(0, group.tokens).view(blocks, group.q_len, *shape)
            x = x.permute(0, 2, 3, 1, 4).flatten(2, 3)
            k = keys.index_select(0, group.pages).view(blocks, -1, layer.kv_heads, layer.head_dim).transpose(1, 2)
            v = values.index_select(0, group.pages).view(blocks, -1, layer.kv_heads, layer.head_dim).transpose(1, 2)
            seen = group.seen
            if group.q_len > 1 and shape[1] > 1:
                seen = seen.unsqueeze(2).expand(-1, -1, shape[1], -1, -1).flatten(2, 3)
            if layer.soft_cap:
                y = capped_attention(x, k, v, seen, layer.scale, layer.soft_cap)
            else:
                y = torch.nn.functional.scaled_dot_product_attention(x, k, v, attn_mask=seen, scale=layer.scale)
            y = y.view(blocks, shape[0], shape[1], group.q_len, shape[2]).permute(0, 3, 1, 2, 4)
            out.index_copy_(0, group.tokens, y.reshape(-1, layer.q_heads, layer.head_dim))
        return out


def capped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float, cap: float
) -> torch.Tensor:
    """Attention whose scores are cap·tanh(score/cap) before the softmax (Gemma 2, 2024). Shapes as in
    scaled_dot_product_attention; ``seen`` is its boolean mask."""
    scores = (q.float() @ k.float().transpose(-1, -2)).mul_(scale / cap).tanh_().mul_(cap)
    return scores.masked_fill_(~seen, float("-inf")).softmax(-1).to(v.dtype) @ v


@hookimpl
def minisgl_configs() -> Any:
    yield "attention", "torch", Torch


@hookimpl
def minisgl_attention(config: Any, device: torch.device) -> AttentionBackend | None:
    return TorchAttention(config, device) if isinstance(config, Torch) else None
