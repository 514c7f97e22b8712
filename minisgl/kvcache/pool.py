"""The KV pool: device memory for the keys and values of all layers, divided into pages.

This module knows shapes, dtype and layout. The owner of each page is known to the scheduler's `PageAllocator` only.
"""

from __future__ import annotations

import math
import mmap
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from torch import Tensor


class KVPool:
    """Keys and values of ``layers`` layers, each with ``num_pages`` pages of ``page_size`` tokens.

    ``num_pages`` includes the scratch page. ``layout`` is the order of dimensions within a page: NHD is
    ``[page_size, kv_heads, head_dim]``, HND is ``[kv_heads, page_size, head_dim]``; `layer` returns both as NHD. The
    memory is initialized with zeros, because attention multiplies masked values by 0, and 0 · NaN would be NaN.
    """

    def __init__(
        self,
        layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        layout: Literal["NHD", "HND"] = "NHD",
    ):
        self.num_pages, self.page_size = num_pages, page_size
        self.dtype, self.device, self.layout = dtype, device, layout
        inner = (page_size, kv_heads) if layout == "NHD" else (kv_heads, page_size)
        self._memory = _zeros((2, layers, num_pages, *inner, head_dim), dtype, device)
        views = self._memory if layout == "NHD" else self._memory.transpose(3, 4)
        self._layers = [(views[0, i], views[1, i]) for i in range(layers)]
        self._flat = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in self._layers] if layout == "NHD" else []

    @staticmethod
    def page_bytes(layers: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Return the size of one page in bytes: keys and values of all layers together."""
        return 2 * layers * page_size * kv_heads * head_dim * dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Size of the pool in bytes."""
        return self._memory.nbytes

    def layer(self, i: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of layer i, each ``[num_pages, page_size, kv_heads, head_dim]`` (strided for HND)."""
        return self._layers[i]

    def store(self, i: int, k: Tensor, v: Tensor, out_cache_loc: Tensor) -> None:
        """Write ``k`` and ``v``, each ``[tokens, kv_heads, head_dim]``, into layer i.

        ``out_cache_loc`` is int32 or int64 ``[tokens]``: the KV location of each token, ``page * page_size + offset``.
        """
        out_cache_loc = out_cache_loc.long()
        if self._flat:
            keys, values = self._flat[i]
            keys.index_copy_(0, out_cache_loc, k.to(self.dtype))
            values.index_copy_(0, out_cache_loc, v.to(self.dtype))
        else:
            keys, values = self._layers[i]
            page_and_offset = (out_cache_loc // self.page_size, out_cache_loc % self.page_size)
            keys[page_and_offset] = k.to(self.dtype)
            values[page_and_offset] = v.to(self.dtype)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros; on a CPU, the operating system provides zeroed memory at the first access.

    ``torch.zeros`` would write to all of it. ``numpy.zeros`` asks for huge pages: a token takes 2 MiB in each layer.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
