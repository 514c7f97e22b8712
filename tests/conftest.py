"""What every test lives with: torch computes in one thread, because its tensors are small and the suite is parallel."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from minisgl.utils.lazy import LazyModule

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the child processes that tests start


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Leaves processes alone that have no torch."""
    torch = sys.modules.get("torch")
    if torch is None or isinstance(torch, LazyModule):
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
