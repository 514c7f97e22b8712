"""The memory that keys and values live in: one pair of buffers for all layers, cut into pages.

It knows shapes, dtype and layout, and nothing of who owns a page: the scheduler's ledger does.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor


class KVPool:
    """``layers`` times ``num_pages`` pages of ``page_size`` tokens; the caller counts the scratch page in.

    ``layout`` is the order within a page: NHD [page_size, kv_heads, head_dim] or HND [kv_heads, page_size, head_dim];
    `layer` shows both as NHD. The memory starts as zeros: attention multiplies what it masks by 0, and 0·NaN is NaN.
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
        """Bytes that one page takes in all layers, keys and values together."""
        return 2 * layers * page_size * kv_heads * head_dim * dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def layer(self, i: int) -> tuple[Tensor, Tensor]:
        """Keys and values of layer i, each [num_pages, page_size, kv_heads, head_dim] (a strided view under HND)."""
        return self._layers[i]

    def store(self, i: int, k: Tensor, v: Tensor, out_cache_loc: Tensor) -> None:
        """Write k, v [tokens, kv_heads, head_dim] to positions where [tokens] (page·page_size + offset) of layer i."""
        out_cache_loc = out_cache_loc.long()
        if self._flat:
            keys, values = self._flat[i]
            keys.index_copy_(0, out_cache_loc, k.to(self.dtype))
            values.index_copy_(0, out_cache_loc, v.to(self.dtype))
        else:
            keys, values = self._layers[i]
            at = (out_cache_loc // self.page_size, out_cache_loc % self.page_size)
            keys[at] = k.to(self.dtype)
            values[at] = v.to(self.dtype)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Like torch.zeros; but on a CPU nothing is written: the system hands out zero pages as they are touched first, so
    that a large pool takes no time and no memory before it is used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
