"""Where the kernels' tests run: on a CUDA device, or on the CPU under Triton's interpreter.

`pytest tests/gpu` on a GPU machine runs them compiled. Elsewhere tests/kernel and tests/plugins run the same files in a
process of their own with TRITON_INTERPRET=1, which must be set before Triton is imported; here they are skipped.
"""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``dtype``: what serves on the device, and float32. The interpreter's tl.dot is wrong in bfloat16."""
    if "dtype" in metafunc.fixturenames:
        half = torch.float16 if INTERPRETED else torch.bfloat16
        metafunc.parametrize("dtype", [torch.float32, half], ids=lambda d: str(d).removeprefix("torch."))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker("gpu")


@pytest.fixture(scope="session")
def device() -> torch.device:
    pytest.importorskip("triton", reason="Triton is not installed here")
    if INTERPRETED:
        torch.set_num_threads(1)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")


@pytest.fixture
def compiled(device: torch.device) -> bool:
    """True on a GPU, where shapes may be of real size; the interpreter takes milliseconds for each program."""
    return device.type == "cuda"


@pytest.fixture
def generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(1234)
