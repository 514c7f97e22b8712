"""``moe=triton`` on a CPU, under Triton's interpreter.

The tests are those of tests/gpu, which run compiled on a machine with a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.testing.interpreter import run_interpreted

pytest.importorskip("triton", reason="Triton is not installed here")
GPU = Path(__file__).parents[2] / "gpu"


def test_triton_moe() -> None:
    """The tests of tests/gpu/test_triton_moe.py pass in a process with TRITON_INTERPRET=1."""
    run_interpreted(GPU / "test_triton_moe.py")
