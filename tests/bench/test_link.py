"""`python -m minisgl.bench link`: the error if there are too few GPUs, and the table of results."""

from __future__ import annotations

import argparse

import pytest
import torch

from minisgl.bench import link
from minisgl.bench.__main__ import main


@pytest.mark.parametrize("words", [[], ["--size", "8"], ["--size", "1"]])
def test_error_without_a_gpu_for_each_rank(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 if not words else 4)
    with pytest.raises(SystemExit) as ended:
        main(["link", *words])
    assert ended.value.code == 2
    message = f"at least two ranks and one GPU for each rank; torch finds {1 if not words else 4} GPUs"
    assert message in capsys.readouterr().err


def test_unavailable_algorithm_has_no_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    args = argparse.Namespace(size=2, hidden=64, rows=[1, 8])
    link.show({"NCCL": [12.94, 13.0], "one-shot": [None, None]}, args)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["rows", "NCCL", "one-shot"],
        ["1", "12.9", "–"],
        ["8", "13.0", "–"],
    ]
