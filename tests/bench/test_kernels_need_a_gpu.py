"""Without a GPU, `python -m minisgl.bench kernels` and `tiles` print an error and exit with status 2."""

from __future__ import annotations

import pytest
import torch

from minisgl.bench.__main__ import main


@pytest.mark.parametrize("name", ["kernels", "tiles"])
def test_error_without_gpu(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main([name])
    assert ended.value.code == 2
    assert "torch finds no CUDA device" in capsys.readouterr().err
