"""Attention over the pages of several KV groups: one backend for each group, which sees the group's page table only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from minisgl.attention import AttentionBackend, AttnBatch, AttnNeeds, GraphKey, LayerSpec, QKNorm
from minisgl.config import ConfigError
from minisgl.core import KVGroup
from minisgl.plugins.cache.grouped.layers import kv_group, slotted, split_layers

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.kvcache.pool import KVPool


class GroupedAttention(AttentionBackend):
    """Passes each layer to the backend of its group. ``build`` returns one more backend of the same kind as ``first``.

    With ``has_graph``, steps may be recorded, with one page table. A model whose layers all lack a window has one
    group, and nothing but ``first``.
    """

    def __init__(
        self,
        first: AttentionBackend,
        build: Callable[[], AttentionBackend],
        page_size: int,
        max_prefill_tokens: int,
        has_graph: bool,
    ):
        self.backends, self._build = [first], build
        self._page_size, self._max_prefill_tokens, self._has_graph = page_size, max_prefill_tokens, has_graph
        self._locations: list[Tensor] = []  # of each group: the KV location of each token of the planned step

    def needs(self) -> AttnNeeds:
        return self.backends[0].needs()

    def group_layers(self, layers: Sequence[LayerSpec]) -> tuple[tuple[KVGroup, ...], int]:
        """Return the KV groups, and the number of layers of the largest one."""
        self.groups = split_layers(layers)
        self.slots = slotted(self.groups)
        if any(layer.window >= 0 for layer in layers):
            obstacle = "graphs record one page table; use graph=none" if self._has_graph else ""
            if not self.needs().groups:
                obstacle = "the attention backend reads pages behind a window; use attention=torch or triton"
            if obstacle:
                raise ConfigError(
                    f"cache=groups can't serve this model's windows here: {obstacle}, or cache=radix, which keeps the "
                    "pages of all positions."
                )
        self.backends += [self._build() for _ in self.groups[1:]]
        found = [kv_group(group[0].window, self._page_size, self._max_prefill_tokens) for group in self.groups]
        return tuple(found), max(map(len, self.groups))

    def bind(self, pool: KVPool, layers: Sequence[LayerSpec], keys: Sequence[GraphKey]) -> None:
        """Bind the backend of each group to its layers, whose indices are their slots in the pool."""
        super().bind(pool, layers, keys)
        for backend, group in zip(self.backends, self.groups, strict=True):
            backend.bind(pool, [self.slots[layer.index][1] for layer in group], keys)

    def plan(self, batch: AttnBatch) -> None:
        """Plan the step in each group, with the group's columns of the page table."""
        if len(self.backends) == 1:
            self.backends[0].plan(batch)
            return
        counts = batch.cu_seqlens_q.diff()
        tokens = torch.arange(int(batch.cu_seqlens_q_cpu[-1]), dtype=torch.int32, device=counts.device)
        firsts = batch.seq_lens - counts - batch.cu_seqlens_q[:-1]  # position of a row's first token, less its number
        positions = tokens + firsts.repeat_interleave(counts)
        rows = batch.req_pool_indices.repeat_interleave(counts).long()
        columns, offsets = torch.div(positions, self._page_size, rounding_mode="floor"), positions % self._page_size
        width = batch.page_table.shape[1] // len(self.backends)
        self._locations = []
        for number, backend in enumerate(self.backends):
            table = batch.page_table[:, number * width : (number + 1) * width]
            self._locations.append(table[rows, columns.long()] * self._page_size + offsets)
            backend.plan(replace(batch, page_table=table, shared_prefix_len=None))

    def attend(
        self, layer: LayerSpec, qkv: Tensor, norm: QKNorm | None, cos_sin: Tensor, out_cache_loc: Tensor
    ) -> Tensor:
        """Compute the layer with its group's backend. ``out_cache_loc`` is replaced by the group's own locations."""
        number, spec, locations = self._where(layer, out_cache_loc)
        return self.backends[number].attend(spec, qkv, norm, cos_sin, locations)

    def norm_rope_store(
        self, layer: LayerSpec, qkv: Tensor, norm: QKNorm | None, cos_sin: Tensor, out_cache_loc: Tensor
    ) -> Tensor:
        """Compute the first part of `attend`, for models that call the parts."""
        number, spec, locations = self._where(layer, out_cache_loc)
        return self.backends[number].norm_rope_store(spec, qkv, norm, cos_sin, locations)

    def forward(self, layer: LayerSpec, q: Tensor, out: Tensor) -> Tensor:
        """Compute the second part of `attend`."""
        number, spec = self.slots[layer.index]
        return self.backends[number].forward(spec, q, out)

    def _where(self, layer: LayerSpec, out_cache_loc: Tensor) -> tuple[int, LayerSpec, Tensor]:
        """Return a layer's group, its spec with its slot in the pool, and the KV locations of the step's tokens."""
        number, spec = self.slots[layer.index]
        return number, spec, self._locations[number] if len(self.backends) > 1 else out_cache_loc
