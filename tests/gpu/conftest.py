"""Fixtures of the GPU tests, which run on a CUDA device or on the CPU under Triton's interpreter.

On a machine with a GPU, `pytest tests/gpu` runs the kernels compiled. Without a GPU these tests are skipped;
tests/kernel and tests/plugins then run the same files in a subprocess with TRITON_INTERPRET=1, which must be set before
Triton is imported.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def find_builtins_once() -> None:
    """Make Triton's interpreter look up the builtins of a module or class of ``triton.language`` only once.

    The interpreter replaces them at every launch, and again at every call of a jitted function in a kernel, when all of
    them are replaced already. Each time it searches all members: a third of the CPU time of these tests.
    """
    from triton.runtime import interpreter

    is_builtin = interpreter.tl.core.is_builtin

    @functools.cache
    def names(owner: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(owner) if is_builtin(member)]

    def patch(owner: Any, builder: Any, scope: Any) -> None:
        if names(owner) and is_builtin(getattr(owner, names(owner)[0])):  # they are replaced all at once
            for name in names(owner):
                if is_builtin(member := getattr(owner, name)):
                    interpreter._patch_attr(owner, name, member, builder, scope)

    interpreter._patch_builtin = patch


def compute_no_dropped_checks() -> None:
    """Turn off the interpreter's check of integer overflows, whose result it drops. It took a third of the CPU time.

    With ``debug``, the interpreter would report an overflow, and the check stays.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise tests that have a ``dtype`` argument: float32 and bfloat16, or float16 under the interpreter.

    The interpreter's tl.dot gives wrong results in bfloat16.
    """
    if "dtype" in metafunc.fixturenames:
        half = torch.float16 if INTERPRETED else torch.bfloat16
        metafunc.parametrize("dtype", [torch.float32, half], ids=lambda d: str(d).removeprefix("torch."))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark all tests of this folder with ``gpu``. Under the interpreter, leave out every second dtype."""
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker("gpu")
    if INTERPRETED:
        chosen = with_dtypes_in_turn(items)
        kept = set(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = chosen


def with_dtypes_in_turn(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests without those of every second dtype: a test's cases take turns with float32 and float16.

    The interpreter computes both with the same lines of a kernel. A test that has only the dtypes as cases keeps both.
    Compiled tests run with all dtypes.
    """
    cases: dict[Any, dict[str, int]] = {}
    chosen = []
    for item in items:
        params = dict(item.callspec.params) if hasattr(item, "callspec") else {}
        dtype = params.pop("dtype", None)
        numbers = cases.setdefault(getattr(item, "function", item), {})
        number = numbers.setdefault(str(params), len(numbers))
        if dtype is None or not params or (dtype == torch.float32) == (number % 2 == 0):
            chosen.append(item)
    return chosen


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device of the tests, or skip the test if there is neither a GPU nor the interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed here")
    if INTERPRETED:
        torch.set_num_threads(1)
        find_builtins_once()
        compute_no_dropped_checks()
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
