"""`attention=triton`: our own paged attention kernels in Triton, of `minisgl.plugins.kernels.ops.triton.attention`.

This file plans a step and chooses launch shapes. A recorded decode launch serves steps of any lengths: the kernel reads
the lengths on the device. From the lengths on the host, ``plan`` computes only the order in which rows start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from minisgl.attention import AttentionBackend, AttnBatch, AttnNeeds, GraphKey, LayerSpec, QKNorm
from minisgl.core import I32
from minisgl.hooks import hookimpl
from minisgl.plugins.kernels.attention import FusedStore
from minisgl.plugins.kernels.ops.fp8 import QuantizedRows
from minisgl.utils.launch import one_launch

if TYPE_CHECKING:
    from minisgl.kvcache.pool import KVPool
    from minisgl.plugins.kernels.ops.triton.attention import Heads, Tile

FUSED_ROWS = 4
"""The most decode rows that `TritonAttention.attend` computes from the result of the QKV projection in one launch, and
one for the merge of its splits. With more rows it was not faster on an H200."""


@dataclass
class Triton:
    """Paged attention kernels in Triton: any page size and head size. On a CPU only under TRITON_INTERPRET=1 (slow)."""

    programs_per_sm: int = 4
    """Number of Triton programs per multiprocessor that decode aims for. It splits each row's KV to reach it."""

    def build(self, device: torch.device) -> AttentionBackend:
        return TritonAttention(self, device)


class ExtendPlan(NamedTuple):
    """Prefill rows of a step, split into tiles of packed queries."""

    cu_seqlens_q: torch.Tensor
    # By group size (query heads per KV head): the tiles, int32 [tiles, 2] (row, number in the row), and the tile shape.
    tiles: dict[int, tuple[torch.Tensor, Tile]]


class DecodeOrder:
    """The order in which decode rows start: the longest first, so that no long row starts last and runs alone.

    A recorded launch reads the order from memory whose address never changes. `reserve` allocates this memory.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._host = np.empty(0, np.int32)
        self._recorded = self._order = torch.empty(0, dtype=torch.int32, device=device)

    def reserve(self, rows: int) -> None:
        """Allocate the memory for recorded launches of up to ``rows`` rows. Called before anything is recorded."""
        self._host = np.arange(rows, dtype=np.int32)
        self._recorded = self._order = torch.arange(rows, dtype=torch.int32, device=self._device)

    def update(self, seq_lens: I32) -> None:
        """Order the rows of a step by ``seq_lens``. Nothing is copied if the last order still fits.

        That is so in most decode steps, because all rows grow by one token.
        """
        n = len(seq_lens)
        lengths = seq_lens[self._host] if n == len(self._host) else None
        if lengths is not None and bool((lengths[:-1] >= lengths[1:]).all()):
            return
        self._host = np.argsort(-seq_lens, kind="stable").astype(np.int32)
        host = torch.from_numpy(self._host)
        if self._device.type == "cuda":
            host = host.pin_memory()
        if n <= len(self._recorded):
            self._order = self._recorded
            self._order[:n].copy_(host, non_blocking=True)
        else:
            self._order = host.to(self._device, non_blocking=True)

    def rows(self, n: int) -> torch.Tensor:
        """Return the rows of the step in order, int32 [n]."""
        return self._order[:n]


class TritonAttention(FusedStore):
    """Backend of attention=triton; `minisgl.attention.AttentionBackend` documents the methods."""

    def __init__(self, config: Triton, device: torch.device):
        import triton

        from minisgl.plugins.kernels.ops.triton import attention, projected_attention

        self.kernels, self.projected, self.device = attention, projected_attention, device
        self.interpreted = triton.knobs.runtime.interpret
        num_sms = 1
        if device.type == "cuda":
            num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.programs = config.programs_per_sm * num_sms
        self.batch: AttnBatch | None = None
        self.extend: ExtendPlan | None = None
        self.order = DecodeOrder(device)

    def needs(self) -> AttnNeeds:
        dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.float32)
        refuse = ""
        if not self.interpreted:
            dtypes += (torch.bfloat16,)  # excluded under Triton's interpreter, where tl.dot is wrong for bfloat16
            if self.device.type != "cuda":
                refuse = "it needs a CUDA device. On a CPU use attention=torch (or TRITON_INTERPRET=1, which is slow)."
        return AttnNeeds(
            kv_dtypes=dtypes,
            graph=True,
            shared_prefix=True,
            device_lengths=True,
            fused_rows=FUSED_ROWS,
            sinks=True,
            groups=True,
            refuse=refuse,
        )

    def bind(self, pool: KVPool, layers: Sequence[LayerSpec], keys: Sequence[GraphKey]) -> None:
        from minisgl.plugins.kernels.ops.triton.early import starts_early

        super().bind(pool, layers, keys)
        self.layers = {
            layer.index: self.kernels.Heads(
                layer.q_heads, layer.kv_heads, layer.head_dim, layer.scale, layer.window, layer.soft_cap, layer.sinks
            )
            for layer in layers
        }
        # Partial results of split KV. If KV is split, rows · kv_heads · splits is at most 4 · programs, so this buffer
        # is large enough for any batch without a shared prefix (`forward` allocates another buffer for one with it).
        size = max(4 * self.programs * h.group * (h.head_dim + 1) for h in self.layers.values())
        self.partial = torch.empty(size, dtype=torch.float32, device=self.device)
        self.order.reserve(max((key.rows for key in keys), default=0))
        # The fused kernels are for half precision and a GPU with programmatic dependent launch.
        early = pool.dtype.itemsize == 2 and bool(starts_early(self.partial))
        self.fused_rows = FUSED_ROWS if early else 0

    def plan(self, batch: AttnBatch) -> None:
        """Order the decode rows by length, and split prefill rows into tiles."""
        self.batch, self.extend = batch, None
        self.order.update(batch.seq_lens_cpu[: batch.num_decode])
        if len(batch.seq_lens_cpu) > batch.num_decode:
            cu_seqlens_q = batch.cu_seqlens_q_cpu[batch.num_decode :]
            groups = {heads.group: heads for heads in self.layers.values()}
            tiles = {group: self._tiles(cu_seqlens_q, batch, heads) for group, heads in groups.items()}
            self.extend = ExtendPlan(batch.cu_seqlens_q[batch.num_decode :], tiles)

    def _tiles(self, cu_seqlens_q: I32, batch: AttnBatch, heads: Heads) -> tuple[torch.Tensor, Tile]:
        """Return (row, number of the tile in its row) of each prefill tile, int32 [tiles, 2], and the tile shape.

        A tile has ``tile.m`` packed queries: each query token counts once for each query head of a group.
        """
        packed = np.diff(cu_seqlens_q) * heads.group
        tile = self.extend_tile(int(packed.max()), heads)
        counts = -(-packed // tile.m)
        row = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        # Sort the tiles by the number of keys that they read, largest first, so that no long tile starts last.
        # `later` is the number of query tokens of the row after the tile.
        later = (packed[row] - np.minimum((number + 1) * tile.m, packed[row])) // heads.group
        order = np.argsort(later - batch.seq_lens_cpu[batch.num_decode :][row], kind="stable")
        host = torch.empty((len(row), 2), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        np.stack((row[order], number[order]), axis=1, out=host.numpy(), casting="same_kind")
        return host.to(self.device, non_blocking=True), tile

    def extend_tile(self, longest: int, heads: Heads) -> Tile:
        """Return the tile of prefill rows; ``longest`` is the packed queries of the longest row."""
        return self.kernels.extend_tile(longest, heads.head_dim, self.pool.dtype)

    @one_launch
    def forward(self, layer: LayerSpec, q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Launch the decode and prefill kernels. ``q`` and ``out`` are [tokens, q_heads, head_dim]."""
        assert self.batch is not None
        batch, heads = self.batch, self.layers[layer.index]
        n = batch.num_decode
        if n:
            self._decode(layer, q[:n], out[:n])
        if self.extend is not None:
            cu_seqlens_q, tiles = self.extend
            rows = self._pages(layer)._replace(req_pool_indices=batch.req_pool_indices[n:], seq_lens=batch.seq_lens[n:])
            self.kernels.extend(q, out, rows, heads, cu_seqlens_q, *tiles[heads.group])
        return out

    def _pages(self, layer: LayerSpec) -> Any:
        """Return the layer's part of the pool, and the rows of the step."""
        assert self.batch is not None
        k, v = self.pool.layer(layer.index)
        return self.kernels.Pages(k, v, self.batch.page_table, self.batch.req_pool_indices, self.batch.seq_lens)

    def _splits(self, layer: LayerSpec, dtype: torch.dtype) -> tuple[int, int]:
        """Return the number of splits of each decode row's KV, and of the shared prefix (0: there is none)."""
        assert self.batch is not None
        n, heads = self.batch.num_decode, self.layers[layer.index]
        splits = self.kernels.decode_splits(n, heads.kv_heads, self.programs)
        # With a sliding window, rows of different lengths attend to different positions.
        if self.batch.shared_prefix_len is None or heads.window >= 0:
            return splits, 0
        return splits, self.kernels.shared_prefix_splits(n, heads, dtype, self.programs)

    def _decode(self, layer: LayerSpec, q: torch.Tensor, out: torch.Tensor | QuantizedRows) -> None:
        """Launch the kernels for the decode rows. ``q`` is [decode rows, q_heads, head_dim]."""
        assert self.batch is not None
        n, heads, partial = len(q), self.layers[layer.index], None
        splits, shares = self._splits(layer, q.dtype)
        if shares:
            size = n * heads.q_heads * (splits + shares) * (heads.head_dim + 1)
            partial = torch.empty(size, dtype=torch.float32, device=q.device)
        elif splits > 1:
            partial = self.partial
        tile = self.kernels.decode_tile(heads.group, heads.head_dim, q.dtype, splits)
        shared = self.batch.shared_prefix_len if shares else None
        order = self.order.rows(n)
        self.kernels.decode(q, out, self._pages(layer), order, heads, splits, partial, tile, shared, shares)

    def attend(
        self,
        layer: LayerSpec,
        qkv: torch.Tensor,
        norm: QKNorm | None,
        cos_sin: torch.Tensor,
        out_cache_loc: torch.Tensor,
    ) -> torch.Tensor:
        """Compute a few decode rows in one launch, and one that merges its splits. Other steps store KV before."""
        if not self.fuses(layer, qkv):
            return super().attend(layer, qkv, norm, cos_sin, out_cache_loc)
        heads, pages = self.layers[layer.index], self._pages(layer)
        out = torch.empty((len(qkv), layer.q_heads, layer.head_dim), dtype=qkv.dtype, device=qkv.device)
        splits = self.projected.attention_splits(len(qkv), heads, self.programs)
        self.projected.attention(qkv, norm, cos_sin, out_cache_loc, pages, heads, splits, self.partial, out)
        return out.flatten(1)

    def fuses(self, layer: LayerSpec, qkv: torch.Tensor) -> bool:
        """Return whether the step has only decode rows, few of them, and no shared prefix.

        See `minisgl.plugins.kernels.attention`.
        """
        batch, rows = self.batch, len(qkv)
        if batch is None or batch.shared_prefix_len is not None or rows > self.fused_rows:
            return False
        if qkv.dtype != self.pool.dtype or not self.projected.serves_attention(self.layers[layer.index]):
            return False
        return rows == batch.num_decode == len(batch.seq_lens_cpu)

    def attend_quantized(
        self,
        layer: LayerSpec,
        qkv: torch.Tensor,
        norm: QKNorm | None,
        cos_sin: torch.Tensor,
        out_cache_loc: torch.Tensor,
    ) -> QuantizedRows | None:
        """Compute decode rows whose parts are merged; the merge quantises: see `minisgl.plugins.kernels.attention`."""
        if self.fuses(layer, qkv) or not self._quantizes(layer, len(qkv)):
            return None
        out = QuantizedRows.empty(qkv, layer.q_heads * layer.head_dim)
        self._forward_quantized(layer, self.norm_rope_store(layer, qkv, norm, cos_sin, out_cache_loc), out)
        return out

    def _quantizes(self, layer: LayerSpec, rows: int) -> bool:
        """Return whether the step has only decode rows, whose parts are merged."""
        if self.batch is None or not rows == self.batch.num_decode == len(self.batch.seq_lens_cpu):
            return False
        heads = self.layers[layer.index]
        return bool(self.kernels.quantizes(heads, sum(self._splits(layer, self.pool.dtype))))

    @one_launch
    def _forward_quantized(self, layer: LayerSpec, q: torch.Tensor, out: QuantizedRows) -> None:
        """Launch decode attention with a merge that quantises."""
        self._decode(layer, q, out)


@hookimpl
def minisgl_wrap_runner(device: torch.device) -> Any:
    """Let decode steps look for a shared prefix, if the backend in use reads it separately."""
    from minisgl.plugins.kernels.attention.shared_prefix import with_shared_prefix

    return with_shared_prefix(device)


@hookimpl
def minisgl_configs() -> Any:
    yield "attention", "triton", Triton
