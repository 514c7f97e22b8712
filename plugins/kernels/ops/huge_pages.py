"""Memory for weights on a CPU in huge pages, where the operating system has them.

Each step reads all weights. A processor looks up the physical address of each page that it reads, and keeps only a few
thousand of these addresses. With pages of 2 MiB instead of 4 KiB they suffice for all weights; on a processor that was
measured, a product of one row then takes two thirds to five sixths of the time (docs/benchmarks/cpu-offline.md).
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
"""Size in bytes of a huge page on most machines; smaller tensors are allocated as usual."""


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor; a large one on a CPU lies in huge pages, if Linux has them free.

    The memory of such a tensor is 0 until it is written, and Linux commits it at the first access.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the kernel was built without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class Arena:
    """Allocates small tensors one after another from blocks of ``block_bytes``, so that they share huge pages.

    A block's memory is released when all of its tensors are deleted and the arena has begun another block.
    """

    def __init__(self, block_bytes: int):
        self._block_bytes = block_bytes
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised CPU tensor, aligned to 64 bytes."""
        nbytes = math.prod(shape) * dtype.itemsize
        if self._used + nbytes > len(self._block):
            self._block = empty((max(nbytes, self._block_bytes),), torch.uint8, torch.device("cpu"))
            self._used = 0
        part = self._block[self._used : self._used + nbytes]
        self._used += -(-nbytes // 64) * 64
        return part.view(dtype).view(tuple(shape))
