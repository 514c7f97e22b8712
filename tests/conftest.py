"""Settings for all tests: torch uses one thread, because the tests' tensors are small and tests run in parallel.

Hypothesis gets no deadline: an example takes long on a busy machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import hypothesis
import pytest

from minisgl.utils.lazy import LazyModule

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
hypothesis.settings.register_profile("minisgl", deadline=None)
hypothesis.settings.load_profile("minisgl")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Set torch to one thread during a test module. Do nothing if torch is not imported."""
    torch = sys.modules.get("torch")
    if torch is None or isinstance(torch, LazyModule):
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
