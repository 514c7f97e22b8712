"""The Triton kernels of plugins/kernels/ops on a CPU, under Triton's interpreter.

It runs the tests of ten files of tests/gpu, which run compiled on a machine with a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.testing.interpreter import run_interpreted

pytest.importorskip("triton", reason="Triton is not installed here")
pytestmark = pytest.mark.timeout(1800)  # these tests compute for a minute or two, and share the processors with others
GPU = Path(__file__).parents[1] / "gpu"


def test_kernels_match_their_torch_references() -> None:
    """The kernel tests of tests/gpu pass in a process with TRITON_INTERPRET=1."""
    run_interpreted(GPU / "test_triton_kernels.py", GPU / "test_reduce.py", GPU / "test_gated_delta.py")


def test_decode_layer_matches_its_torch_references() -> None:
    """So do the kernels for a few decode rows, and the decoder layers computed with them."""
    run_interpreted(GPU / "test_decode_layer.py", GPU / "test_few_rows.py")


def test_fused_products_match_their_torch_references() -> None:
    """So do the products that are fused with norms, and the decoder layers computed with them."""
    run_interpreted(GPU / "test_fused_linear.py", GPU / "test_fused_layers.py")


def test_rounds_match_their_torch_reference() -> None:
    """So do the launch between two rounds of verification, and the replays of one graph in an engine."""
    run_interpreted(GPU / "test_rounds.py")


def test_promise_8_exact_kernels() -> None:
    """So do the kernels of ``exact=true``, and a small engine with them."""
    run_interpreted(GPU / "test_exact.py")


def test_fp8_products_match_float64() -> None:
    """So do the products with FP8 weights."""
    run_interpreted(GPU / "test_fp8.py")


def test_failures_are_reported(tmp_path: Path) -> None:
    """A failing test file and a file without tests are errors; otherwise interpreted tests would always pass."""
    broken, empty = tmp_path / "test_broken.py", tmp_path / "test_empty.py"
    broken.write_text("def test_it():\n    assert 1 == 2, 'the kernel is wrong'\n")
    empty.write_text("")
    with pytest.raises(AssertionError, match="the kernel is wrong"):
        run_interpreted(broken)
    with pytest.raises(AssertionError, match="no tests ran"):
        run_interpreted(empty)
