"""`attention=torch`: attention over pages with torch's scaled_dot_product_attention, on CPU and GPU.

It is the readable reference implementation. Pages are gathered into a dense tensor before each call, which costs a copy
of the KV. Rows of similar length are gathered together, to limit padding. Only a few rows are gathered at a time: on a
CPU the copy is then still in the processor's cache when attention reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from minisgl.attention import AttentionBackend, AttnBatch, AttnNeeds, GraphKey, LayerSpec, QKNorm
from minisgl.hooks import hookimpl
from minisgl.plugin_manager.discovery import exists
from minisgl.utils.launch import one_launch

if TYPE_CHECKING:
    from minisgl.kvcache.pool import KVPool


@dataclass
class Torch:
    """scaled_dot_product_attention over gathered pages: any device, any page size."""

    gather_mb: int | None = None
    """MiB of one layer's KV gathered at a time, with the scores of layers with sinks or a soft cap. By default 4 on a
    CPU and 512 on a GPU."""
    block: int = 256
    """Number of queries of a prefill chunk computed at a time. Each block reads only the KV up to its last query."""

    def build(self, device: torch.device) -> AttentionBackend:
        return TorchAttention(self, device)


HAS_KERNELS = exists("minisgl.plugins.kernels")
"""Whether the folder ``plugins/kernels`` exists. Without it, a GPU runs the plain torch functions."""


class Group(NamedTuple):
    """Blocks of ``q_len`` queries each, computed in one call. Their KV is padded to the same number of pages."""

    blocks: int  # number of blocks
    q_len: int  # queries of each block
    pages: torch.Tensor  # [blocks * pages] page numbers
    mask: torch.Tensor  # [blocks, 1, q_len, pages * page_size] bool: which positions each query attends to


class Plan(NamedTuple):
    """Plan of one step, for all layers with the same window."""

    groups: list[Group]
    order: torch.Tensor  # [tokens] indices into q in the order in which the groups compute them


class TorchAttention(AttentionBackend):
    """Backend of attention=torch; `minisgl.attention.AttentionBackend` documents the methods."""

    def __init__(self, config: Torch, device: torch.device):
        self.device, self.block = device, config.block
        self.budget = (config.gather_mb or (4 if device.type == "cpu" else 512)) << 20
        self.plans: dict[int, Plan] = {}  # by window

    def needs(self) -> AttnNeeds:
        # On a CPU a simulated graph records ``forward`` as one launch. On a GPU a graph would record kernels whose
        # number and shapes depend on the lengths of the rows.
        return AttnNeeds(graph=self.device.type == "cpu", sinks=True, groups=True)

    def bind(self, pool: KVPool, layers: Sequence[LayerSpec], keys: Sequence[GraphKey]) -> None:
        super().bind(pool, layers, keys)
        self.windows = sorted({layer.window for layer in layers})
        self.page_bytes = pool.page_bytes(1, pool.page_size, layers[0].kv_heads, layers[0].head_dim, pool.dtype)
        plain = [layer.q_heads for layer in layers if layer.soft_cap or layer.sinks is not None]
        self.score_bytes = 4 * max(plain, default=0)  # of a query and a key: only `plain_attention` stores scores
        # Buffers for gathered keys and values, reused by all calls: on a CPU, allocating new memory costs as much time
        # as the gather itself.
        self.gathered = [torch.empty_like(buffer[:0]) for buffer in pool.layer(0)]

    def plan(self, batch: AttnBatch) -> None:
        """Split every row into blocks of queries, and compute pages and mask of each block for each window size."""
        q_lens = np.diff(batch.cu_seqlens_q_cpu)
        blocks = -(-q_lens // self.block)
        row = np.repeat(np.arange(len(q_lens)), blocks)
        offset = (np.arange(len(row)) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * self.block
        q_len = np.minimum(q_lens[row] - offset, self.block)
        later = q_lens[row] - offset - q_len  # number of the row's queries after this block
        begin = batch.cu_seqlens_q_cpu[row] + offset
        end = batch.seq_lens_cpu[row] - later
        block_arrays = (row, q_len, begin, end, later)
        self.plans = {window: self._plan_window(batch, window, *block_arrays) for window in self.windows}
        max_pages = max(len(group.pages) for plan in self.plans.values() for group in plan.groups)
        if max_pages > len(self.gathered[0]):
            self.gathered = [torch.empty_like(buffer[:1]).repeat(max_pages, 1, 1, 1) for buffer in self.pool.layer(0)]

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
        """Plan the step for the layers with one window size.

        The arrays have one entry for each block: its row, its number of queries, its first query token in the step, the
        position after its last query, and the number of the row's queries after the block.
        """
        page = self.pool.page_size
        first = np.maximum(end - q_len + 1 - window, 0) // page if window >= 0 else np.zeros_like(end)
        pages = -(-end // page) - first
        order = np.lexsort((-pages, q_len))
        upload = np.stack((row, begin, later, first, pages)).astype(np.int64)[:, order]
        on_device = torch.from_numpy(upload).to(self.device, non_blocking=True)
        rows, begins, laters, firsts, counts = on_device.unsqueeze(2)  # each [blocks, 1]
        column = torch.arange(int(pages.max()), device=self.device)
        # Padding reads the block's own last page again. The KV of another request could be NaN, and 0 · NaN is NaN.
        table = batch.page_table[batch.req_pool_indices[rows].long(), firsts + torch.minimum(column, counts - 1)]
        last = batch.seq_lens[rows] - laters - 1  # position of the block's last query
        # Blocks with one query come first in the order. Their masks are small, so one comparison computes all of them.
        single = int(np.count_nonzero(q_len == 1))
        single_mask = self._mask(firsts[:single] * page, last[:single], 1, len(column) * page, window)
        groups, tokens = [], [begins[:single].flatten()]
        for a, b in self._split_blocks(q_len[order], pages[order]):
            queries, width = int(q_len[order[a]]), int(pages[order[a]])
            if queries == 1:
                mask = single_mask[a:b, ..., : width * page]
            else:
                mask = self._mask(firsts[a:b] * page, last[a:b], queries, width * page, window)
                tokens.append((begins[a:b] + torch.arange(queries, device=self.device)).flatten())
            groups.append(Group(b - a, queries, table[a:b, :width].flatten(), mask))
        return Plan(groups, torch.cat(tokens))

    def _mask(self, first: torch.Tensor, last: torch.Tensor, q_len: int, length: int, window: int) -> torch.Tensor:
        """Return the causal mask of blocks of ``q_len`` queries, bool [blocks, 1, q_len, length].

        The keys of a block are ``length`` positions from ``first`` on; its last query is at position ``last`` (both
        [blocks, 1]).
        """
        position = (last - (q_len - 1) + torch.arange(q_len, device=self.device)).unsqueeze(2)
        key = (first + torch.arange(length, device=self.device)).unsqueeze(1)
        mask = key <= position
        if window >= 0:
            mask &= key > position - window
        return mask.unsqueeze(1)

    def _split_blocks(self, q_len: np.ndarray, pages: np.ndarray) -> list[tuple[int, int]]:
        """Split the blocks into ranges that are computed in one call.

        The blocks of a range have the same q_len. Their gathered KV, with the scores where they are stored, fits the
        budget (but a range has at least one block), and at most half of it is padding. Blocks of equal q_len are sorted
        by ``pages``, largest first.
        """
        ranges, a = [], 0
        while a < len(pages):
            page_bytes = self.page_bytes + int(q_len[a]) * self.pool.page_size * self.score_bytes
            max_blocks = max(1, self.budget // (int(pages[a]) * page_bytes))
            same_q_len = q_len[a : a + max_blocks] == q_len[a]
            little_padding = pages[a : a + max_blocks] * 2 > pages[a]
            b = a + int(np.argmin(np.append(same_q_len & little_padding, False)))
            ranges.append((a, b))
            a = b
        return ranges

    def norm_rope_store(
        self,
        layer: LayerSpec,
        qkv: torch.Tensor,
        norm: QKNorm | None,
        cos_sin: torch.Tensor,
        out_cache_loc: torch.Tensor,
    ) -> torch.Tensor:
        """Compute `AttentionBackend.norm_rope_store`: on a GPU in one launch, if ``plugins/kernels`` exists."""
        if not (HAS_KERNELS and qkv.is_cuda):
            return super().norm_rope_store(layer, qkv, norm, cos_sin, out_cache_loc)
        from minisgl.plugins.kernels.attention import fused_store

        return fused_store(self.pool, layer, qkv, norm, cos_sin, out_cache_loc)

    @one_launch
    def forward(self, layer: LayerSpec, q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Gather and compute group after group. ``q`` and ``out`` are [tokens, q_heads, head_dim]."""
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
    """Compute attention of q [blocks * q_len, q_heads, dim] over k, v [blocks, kv_heads, length, dim].

    The result has the shape of q.
    """
    if group.q_len == 1:
        # Treat the query heads that share a KV head as several queries of that head. All of them are at the position
        # of the block's only query, so they have the same mask.
        x = q.view(group.blocks, layer.kv_heads, -1, layer.head_dim)
    else:
        x = q.view(group.blocks, group.q_len, layer.q_heads, layer.head_dim).transpose(1, 2)
    attention = torch.nn.functional.scaled_dot_product_attention
    if layer.soft_cap or layer.sinks is not None:
        sinks = layer.sinks
        if sinks is not None:  # as the queries: [kv_heads, queries, 1] or [q_heads, 1, 1]
            sinks = sinks.float().view(layer.kv_heads, -1, 1) if group.q_len == 1 else sinks.float().view(-1, 1, 1)
        y = plain_attention(x, k, v, group.mask, layer.scale, layer.soft_cap, sinks)
    else:
        y = attention(x, k, v, attn_mask=group.mask, scale=layer.scale, enable_gqa=group.q_len > 1)
    return (y if group.q_len == 1 else y.transpose(1, 2)).reshape(q.shape)


def plain_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention with soft-capped scores (Gemma 2, 2024) or sinks (gpt-oss, 2025), or both.

    The shapes and the boolean ``mask`` are those of torch's scaled_dot_product_attention, which has neither. ``cap`` 0:
    the scores are not capped. ``sinks`` is float32 and has the shape of ``q`` for each row, but 1 in places of equal
    sinks: [heads, queries or 1, 1].
    """

    def by_kv_head(x: torch.Tensor) -> torch.Tensor:
        """Return x [blocks, heads, queries, n] with the queries of all heads that share a KV head one after another."""
        return x.reshape(len(x), k.shape[1], -1, x.shape[-1])

    scores = (by_kv_head(q.float()) @ k.float().mT).view(*q.shape[:-1], -1).mul_(scale)
    if cap:
        scores = scores.div_(cap).tanh_().mul_(cap)
    scores = scores.masked_fill_(~mask, float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:  # one more column takes part in the softmax; no value belongs to it
        weights = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1).softmax(-1)[..., :-1]
    return (by_kv_head(weights.to(v.dtype)) @ v).view(q.shape)


@hookimpl
def minisgl_configs() -> Any:
    yield "attention", "torch", Torch
