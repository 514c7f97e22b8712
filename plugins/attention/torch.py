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
    """MiB of one layer's KV gathered at a time; by default 4 on a CPU, 512 on a GPU."""
    block: int = 256
    """Queries of a prefill chunk computed at a time: each block reads only the KV before its end."""


class Group(NamedTuple):
    """Blocks of ``q_len`` queries that are computed in one call. Their KV is padded to the same number of pages."""

    blocks: int
    q_len: int
    pages: torch.Tensor  # [blocks * pages] pool pages
    seen: torch.Tensor  # [blocks, 1, q_len, pages * page_size] bool: which positions each query sees


class Plan(NamedTuple):
    """One step, for all layers with the same window."""

    groups: list[Group]
    order: torch.Tensor  # [tokens]: which row of q is computed when, group after group


class TorchAttention:
    """See `minisgl.attention.AttentionBackend` for what is asked for and when."""

    def __init__(self, config: Torch, device: torch.device):
        self.device, self.block = device, config.block
        self.budget = (config.gather_mb or (4 if device.type == "cpu" else 512)) << 20
        self.plans: dict[int, Plan] = {}  # by window

    def needs(self) -> AttnNeeds:
        # On a CPU a planned call counts as one launch; on a GPU its kernels depend on the lengths.
        return AttnNeeds(graph=self.device.type == "cpu")

    def bind(self, pool: KVPool, layers: Sequence[LayerSpec], keys: Sequence[GraphKey]) -> None:
        self.pool = pool
        self.windows = sorted({layer.window for layer in layers})
        self.page_bytes = pool.page_bytes(1, pool.page_size, layers[0].kv_heads, layers[0].head_dim, pool.dtype)
        # Gathered into again and again: on a CPU, fresh memory for each gather costs as much as the gather.
        self.gathered = [torch.empty_like(buffer[:0]) for buffer in pool.layer(0)]

    def plan(self, batch: AttnBatch) -> None:
        """Cut every row into blocks of queries, and find for each window which pages they read, and what they see."""
        q_lens = np.diff(batch.cu_seqlens_q_cpu)
        blocks = -(-q_lens // self.block)
        row = np.repeat(np.arange(len(q_lens)), blocks)
        offset = (np.arange(len(row)) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * self.block
        q_len = np.minimum(q_lens[row] - offset, self.block)
        later = q_lens[row] - offset - q_len  # queries of the row behind this block
        begin = batch.cu_seqlens_q_cpu[row] + offset
        end = batch.seq_lens_cpu[row] - later
        cut = (row, q_len, begin, end, later)
        self.plans = {window: self._plan_window(batch, window, *cut) for window in self.windows}
        most = max(len(group.pages) for plan in self.plans.values() for group in plan.groups)
        if most > len(self.gathered[0]):
            self.gathered = [torch.empty_like(buffer[:1]).repeat(most, 1, 1, 1) for buffer in self.pool.layer(0)]

    def _plan_window(
        self,
        batch: AttnBatch,
        window: int,
        row: np.ndarray,
        q_len: np.ndarray,
        begin: np.ndarray,
        end: np.ndarray,
        later: np.ndarray,
    ) -> Plan:
        page = self.pool.page_size
        first = np.maximum(end - q_len + 1 - window, 0) // page if window >= 0 else np.zeros_like(end)
        pages = -(-end // page) - first
        order = np.lexsort((-pages, q_len))
        upload = np.stack((row, begin, later, first, pages)).astype(np.int64)[:, order]
        on_device = torch.from_numpy(upload).to(self.device, non_blocking=True)
        rows, begins, laters, firsts, counts = on_device.unsqueeze(2)  # each [blocks, 1]
        column = torch.arange(int(pages.max()), device=self.device)
        # Padding reads the block's own last page again: a neighbour's NaN must not leak in as 0 * NaN.
        table = batch.page_table[batch.req_pool_indices[rows].long(), firsts + torch.minimum(column, counts - 1)]
        last = batch.seq_lens[rows] - laters - 1  # position of the block's last query
        # Blocks of one query come first, and their masks are small: one comparison makes all of them.
        single = int(np.count_nonzero(q_len == 1))
        seen_by_single = self._seen(firsts[:single] * page, last[:single], 1, len(column) * page, window)
        groups, tokens = [], [begins[:single].flatten()]
        for a, b in self._cut(q_len[order], pages[order]):
            queries, width = int(q_len[order[a]]), int(pages[order[a]])
            if queries == 1:
                seen = seen_by_single[a:b, ..., : width * page]
            else:
                seen = self._seen(firsts[a:b] * page, last[a:b], queries, width * page, window)
                tokens.append((begins[a:b] + torch.arange(queries, device=self.device)).flatten())
            groups.append(Group(b - a, queries, table[a:b, :width].flatten(), seen))
        return Plan(groups, torch.cat(tokens))

    def _seen(self, first: torch.Tensor, last: torch.Tensor, q_len: int, length: int, window: int) -> torch.Tensor:
        """[blocks, 1, q_len, length]: of the positions from ``first`` on, which are seen by the ``q_len`` queries that
        end at ``last`` (both [blocks, 1])."""
        position = (last - (q_len - 1) + torch.arange(q_len, device=self.device)).unsqueeze(2)
        key = (first + torch.arange(length, device=self.device)).unsqueeze(1)
        seen = key <= position
        if window >= 0:
            seen &= key > position - window
        return seen.unsqueeze(1)

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
        groups, order = self.plans[layer.window]
        ordered = q.index_select(0, order)
        done, a = [], 0
        for group in groups:
            n = group.pages.shape[0]
            shape = (group.blocks, -1, layer.kv_heads, layer.head_dim)
            k = torch.index_select(keys, 0, group.pages, out=self.gathered[0][:n]).view(shape).transpose(1, 2)
            v = torch.index_select(values, 0, group.pages, out=self.gathered[1][:n]).view(shape).transpose(1, 2)
            b = a + group.blocks * group.q_len
            done.append(attend(ordered[a:b], k, v, group, layer))
            a = b
        return out.index_copy_(0, order, torch.cat(done) if len(done) > 1 else done[0])


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group, layer: LayerSpec) -> torch.Tensor:
    """q [blocks * q_len, q_heads, dim] over k, v [blocks, kv_heads, length, dim]; returns q's shape."""
    if group.q_len == 1:
        # The query heads that share a kv head stand beside each other like queries: they see the same, anyway.
        x = q.view(group.blocks, layer.kv_heads, -1, layer.head_dim)
    else:
        x = q.view(group.blocks, group.q_len, layer.q_heads, layer.head_dim).transpose(1, 2)
    attention = torch.nn.functional.scaled_dot_product_attention
    if layer.soft_cap:
        y = capped_attention(x, k, v, group.seen, layer.scale, layer.soft_cap)
    else:
        y = attention(x, k, v, attn_mask=group.seen, scale=layer.scale, enable_gqa=group.q_len > 1)
    return (y if group.q_len == 1 else y.transpose(1, 2)).reshape(q.shape)


def capped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float, cap: float
) -> torch.Tensor:
    """Attention whose scores are cap·tanh(score/cap) before the softmax (Gemma 2, 2024). Shapes as in
    scaled_dot_product_attention, which has no such cap; ``seen`` is its boolean mask."""
    sharing = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(sharing, dim=1), v.repeat_interleave(sharing, dim=1)
    scores = (q.float() @ k.float().transpose(-1, -2)).mul_(scale / cap).tanh_().mul_(cap)
    return scores.masked_fill_(~seen, float("-inf")).softmax(-1).to(v.dtype) @ v


@hookimpl
def minisgl_configs() -> Any:
    yield "attention", "torch", Torch


@hookimpl
def minisgl_attention(config: Any, device: torch.device) -> AttentionBackend | None:
    return TorchAttention(config, device) if isinstance(config, Torch) else None
