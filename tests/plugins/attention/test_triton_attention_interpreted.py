"""Tests of attention=triton on a CPU: runs the tests of tests/gpu under Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.testing.interpreter import run_interpreted

pytest.importorskip("triton", reason="Triton is not installed here")
GPU = Path(__file__).parents[2] / "gpu"


def test_under_interpreter() -> None:
    """The kernel and engine tests of attention=triton pass under TRITON_INTERPRET=1."""
    run_interpreted(GPU / "test_triton_attention.py", GPU / "test_triton_engine.py")
