"""The timeline of the device is computed from events; without a GPU, the command prints an error."""

from __future__ import annotations

import pytest
import torch

from minisgl.bench import profile


def test_timeline() -> None:
    """Overlapping events count once, and gaps between events are idle time."""
    line = profile.timeline([("b", 5.0, 9.0), ("a", 0.0, 2.0), ("copy", 6.0, 7.0), ("a", 11.0, 12.0)])
    assert line.span == 12.0
    assert line.idle == 3.0 + 2.0
    assert line.kernels == [("b", 4.0, 1), ("a", 3.0, 2), ("copy", 1.0, 1)]
    assert profile.timeline([]).span == 0.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        profile.main([])
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    profile.main(["--rows", "8", "--input", "32", "--steps", "10"])
    assert "device idle" in capsys.readouterr().out
