"""Which forward passes are searched for kernels; tests/gpu/test_compile_ahead.py compiles them on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl.plugins.graph.replaying.compile_ahead import Case, _kernels_of

OUT_OF_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory.\nSee the documentation"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
)


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["torch", "triton"])
def test_a_step_that_does_not_fit_is_left_out(error: RuntimeError) -> None:
    """The kernels of the other steps are still found: one large step must not end the compilation of all others."""
    cases = [Case(lambda: None, lambda inputs: torch.zeros(0)) for _ in range(4)]

    def note(case: Case) -> list[Any]:
        if case is cases[1]:
            raise error
        return [cases.index(case)]

    assert list(_kernels_of(cases, note)) == [[0], [2], [3]]


@pytest.mark.parametrize("error", [None, *OUT_OF_MEMORY], ids=["fits", "torch", "triton"])
def test_memory_is_given_back_before_each_step(error: RuntimeError | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the graphs that were thrown away fill the device, and a kernel that is loaded next finds no memory."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("given back"))

    def note(case: Case) -> list[Any]:
        calls.append("recorded")
        if error is not None:
            raise error
        return []

    list(_kernels_of([Case(lambda: None, lambda inputs: torch.zeros(0))] * 3, note))
    assert calls == ["given back", "recorded"] * 3


def test_other_errors_are_raised() -> None:
    def note(case: Case) -> list[Any]:
        raise RuntimeError("an error of the model")

    with pytest.raises(RuntimeError, match="an error of the model"):
        list(_kernels_of([Case(lambda: None, lambda inputs: torch.zeros(0))], note))
