"""Programmatic dependent launch (PDL): a kernel starts while the preceding kernel is still running.

The kernel sets itself up, then waits inside for the preceding kernel's results. Without PDL a GPU idles between two
small kernels for about as long as the kernels run: the first one drains before the second one is set up. See
"Programmatic Dependent Launch" in the CUDA programming guide. PDL needs compute capability 9.
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
    """Return the launch options that start a kernel early on x's device, or none if the device has no PDL.

    Every program of a kernel launched with ``EARLY`` must call ``wait_for_previous`` before it accesses memory that
    other kernels write or read. It may read weights before that call.
    """
    if not x.is_cuda or not _capable(x.device.index):
        return {}
    return _OPTIONS


_OPTIONS = {"EARLY": True, "launch_pdl": True}


@functools.cache
def _capable(device: int) -> bool:
    return not triton.knobs.runtime.interpret and torch.cuda.get_device_capability(device)[0] >= 9
