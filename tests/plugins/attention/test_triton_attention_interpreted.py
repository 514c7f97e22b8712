"""attention=triton on a CPU: tests/gpu has the tests, which run compiled where there is a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.testing.interpreter import run_interpreted

pytest.importorskip("triton", reason="Triton is not installed here")
GPU = Path(__file__).parents[2] / "gpu"


def test_attention_agrees_with_softmax_under_the_interpreter() -> None:
    run_interpreted(GPU / "test_triton_attention.py", GPU / "test_triton_engine.py")
