"""Fixtures of the GPU tests, which run on a CUDA device or on the CPU under Triton's interpreter.

On a machine with a GPU, `pytest tests/gpu` runs the kernels compiled. Without a GPU these tests are skipped;
tests/kernel and tests/plugins then run the same files in a subprocess with TRITON_INTERPRET=1, which must be set before
Triton is imported.
"""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise tests that have a ``dtype`` argument: float32 and bfloat16, or float16 under the interpreter.

    The interpreter's tl.dot gives wrong results in bfloat16.
    """
    if "dtype" in metafunc.fixturenames:
        half = torch.float16 if INTERPRETED else torch.bfloat16
        metafunc.parametrize("dtype", [torch.float32, half], ids=lambda d: str(d).removeprefix("torch."))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder with ``gpu``."""
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker("gpu")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device of the tests, or skip the test if there is neither a GPU nor the interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed here")
    if INTERPRETED:
        torch.set_num_threads(1)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")


@pytest.fixture
def compiled(device: torch.device) -> bool:
    """Return whether kernels run compiled, on a GPU.

    Under the interpreter each program takes milliseconds, so tests must use small shapes.
    """
    return device.type == "cuda"


@pytest.fixture
def generator(device: torch.device) -> torch.Generator:
    """Return a seeded random number generator on the device."""
    return torch.Generator(device=device).manual_seed(1234)
