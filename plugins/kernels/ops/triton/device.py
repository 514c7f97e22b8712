"""`device_function`, a function that Triton kernels call, with one key in Triton's cache for each kernel.

Triton's cache of compiled kernels has a key for each kernel: a hash of its source, of the functions that it calls, and
of the global constants that they use. In Triton 3.6 and 3.7, the key of a kernel lacks the constants of a called
function, if the key of this function was not computed before. So a kernel could have two keys, depending on the order
in which a process used its kernels, and a kernel that another process had compiled was compiled again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton

__all__ = ["device_function", "is_hopper", "multiprocessors"]


def device_function(function: Callable[..., Any]) -> Any:
    """Decorate a function that kernels call: `triton.jit`, and its cache key is computed at once.

    Constants and functions that it uses must be defined before it.
    """
    made = triton.jit(function)
    getattr(made, "cache_key", None)  # a property; functions of the interpreter have none
    return made


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Return whether the CUDA device is a Hopper GPU (compute capability 9), such as the H100 and the H200."""
    return torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the CUDA device's number of multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count
