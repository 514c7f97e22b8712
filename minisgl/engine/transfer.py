"""Copies between host and device that nobody waits for. On a CPU they are no copies at all.

On CUDA the host side is pinned memory from torch's caching allocator, which reuses a block only when the copies that
use it are done; so nothing here is kept or overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.core import I32


class Uploader:
    """Host arrays to the device, many in one copy."""

    def __init__(self, device: torch.device):
        self.device = device

    def __call__(self, arrays: Sequence[I32]) -> list[Tensor]:
        """The arrays as int32 tensors on the device; the copy is ordered on the current stream.

        On a CPU the tensors share memory with the arrays, which nobody may change afterwards.
        """
        if self.device.type == "cpu":
            return [torch.from_numpy(a) for a in arrays]
        host = torch.empty(sum(a.size for a in arrays), dtype=torch.int32, pin_memory=True)
        if arrays:
            np.concatenate([a.reshape(-1) for a in arrays], out=host.numpy())
        flat = host.to(self.device, non_blocking=True)
        parts = flat.split([a.size for a in arrays])
        return [part.view(a.shape) for part, a in zip(parts, arrays, strict=True)]


class Download:
    """Tensors on their way to the host, on ``stream``, the current one. `arrays` waits for them, and for nothing
    launched later."""

    def __init__(self, tensors: Sequence[Tensor], stream: torch.cuda.Stream | None = None):
        self._event: Any = None
        if tensors and stream is not None:
            host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
            for h, t in zip(host, tensors, strict=True):
                h.copy_(t, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(stream)
            self._tensors: Sequence[Tensor] = host
        else:
            self._tensors = tensors

    def arrived(self) -> bool:
        """Whether `arrays` would return at once."""
        return self._event is None or bool(self._event.query())

    def arrays(self) -> list[np.ndarray[Any, Any]]:
        if self._event is not None:
            self._event.synchronize()
        return [t.numpy() for t in self._tensors]
