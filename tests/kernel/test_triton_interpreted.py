"""The Triton kernels of minisgl/kernel on a CPU: tests/gpu has the tests, which run compiled where there is a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.testing.interpreter import run_interpreted

pytest.importorskip("triton", reason="Triton is not installed here")
GPU = Path(__file__).parents[1] / "gpu"


def test_kernels_agree_with_their_twins_under_the_interpreter() -> None:
    run_interpreted(GPU / "test_triton_kernels.py", GPU / "test_reduce.py")


def test_a_failing_kernel_test_is_not_passed_over(tmp_path: Path) -> None:
    """What this guards: the two tests beside it say nothing unless a failure, or no test at all, comes through."""
    broken, empty = tmp_path / "test_broken.py", tmp_path / "test_empty.py"
    broken.write_text("def test_it():\n    assert 1 == 2, 'the kernel is wrong'\n")
    empty.write_text("")
    with pytest.raises(AssertionError, match="the kernel is wrong"):
        run_interpreted(broken)
    with pytest.raises(AssertionError, match="no tests ran"):
        run_interpreted(empty)
