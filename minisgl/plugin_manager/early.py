"""Work that a plugin begins before a process imports torch, such as starting processes that import torch themselves.

The plugins of such a process are not loaded yet, because they import torch. So an options dataclass names a function,
in a class attribute ``early_context``, and the starter of the process passes the name on.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

__all__ = ["early_functions", "started_early"]


def early_functions(*parts: Any) -> list[str]:
    """Return the functions that the options of some groups name: each as ``module.function``."""
    return [part.early_context for part in parts if hasattr(part, "early_context")]


@contextmanager
def started_early(functions: Sequence[str], device: str, tp: int) -> Iterator[None]:
    """Enter the context that each function returns, called as ``function(device, tp)``, while the body runs.

    ``device`` and ``tp`` are the options of these names. The body builds the engine. It may enter the same contexts.
    """
    with ExitStack() as stack:
        for name in functions:
            module, _, function = name.rpartition(".")
            stack.enter_context(getattr(importlib.import_module(module), function)(device, tp))
        yield
