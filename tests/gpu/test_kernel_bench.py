"""The kernel benchmark runs: every version of a kernel is timed, and no share of the hardware limit is implausible."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from minisgl.bench import kernels, timing


def test_every_version_is_timed(tmp_path: Path, compiled: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """The report has a time for the torch and the Triton version of each kernel."""
    if not compiled:
        pytest.skip("needs a CUDA device")
    report = tmp_path / "kernels.json"
    kernels.main(["--only", "add_rms_norm", "softmax_topk", "--json", str(report)])
    results = json.loads(report.read_text("utf-8"))["results"]
    assert {line["kernel"] for line in results} == {"add_rms_norm", "softmax_topk"}
    assert {line["version"] for line in results} >= {"torch", "triton"}
    assert all(line["us"] > 0 for line in results if line["version"] in ("torch", "triton"))
    large = [line for line in results if line["shape"].startswith("8192")]
    assert large
    # Data in the L2 cache makes shares above 1 possible, but not above 3.
    assert all(line["share"] < 3.0 for line in large if line["share"] is not None)
    assert "of the limit" in capsys.readouterr().out


def test_functions_that_synchronise_are_timed(compiled: bool) -> None:
    """A function that waits for the device is detected, and timed too."""
    if not compiled:
        pytest.skip("needs a CUDA device")
    x = torch.ones(1000, device="cuda")
    assert timing.synchronizes(lambda: x.sum().item())
    assert not timing.synchronizes(lambda: x + 1)
    assert timing.time_us(lambda: x.sum().item()) > 0
