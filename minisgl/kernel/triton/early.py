"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits for its results inside.

Between two small kernels a GPU otherwise idles for as long as they run: one drains, then the next is set up. See
"Programmatic Dependent Launch" in the CUDA programming guide; it needs compute capability 9.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents as start_next
from triton.language.extra.cuda import gdc_wait as wait_for_previous

__all__ = ["start_next", "starts_early", "wait_for_previous"]


def starts_early(x: Tensor) -> dict[str, bool]:
    """Launch options of a kernel on x's device. Every program of a kernel with ``EARLY`` must call
    ``wait_for_previous`` before it touches memory that other kernels write or read; weights may be read before."""
    if not x.is_cuda or not _capable(x.device.index):
        return {}
    return _OPTIONS


_OPTIONS = {"EARLY": True, "launch_pdl": True}


@functools.cache
def _capable(device: int) -> bool:
    return not triton.knobs.runtime.interpret and torch.cuda.get_device_capability(device)[0] >= 9
