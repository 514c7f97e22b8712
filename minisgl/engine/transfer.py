"""Asynchronous copies between host and device. On a CPU no data is copied.

On CUDA the host side is pinned memory from torch's caching allocator, which reuses a block only after the copies that
use the block have finished. So the code here may drop its references to pinned memory before a copy has finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.core import I32


class Uploader:
    """Uploader of host arrays: all arrays of a call go to the device in one copy."""

    def __init__(self, device: torch.device):
        self.device = device

    def __call__(self, arrays: Sequence[I32]) -> list[Tensor]:
        """Return the arrays as int32 tensors on the device. The copy is ordered on the current stream.

        On a CPU the tensors share memory with the arrays, so the caller must not change the arrays afterwards.
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
    """An asynchronous copy of tensors to the host, on ``stream``, which must be the current stream.

    `arrays` waits for this copy, and not for work that is launched later.
    """

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

    def ready(self) -> bool:
        """Return whether `arrays` would return without waiting."""
        return self._event is None or bool(self._event.query())

    def arrays(self) -> list[np.ndarray[Any, Any]]:
        """Wait until the copy has finished and return the tensors as numpy arrays."""
        if self._event is not None:
            self._event.synchronize()
        return [t.numpy() for t in self._tensors]
