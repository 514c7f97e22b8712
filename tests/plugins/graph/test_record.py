"""Tests of `Recorder` for GPUs, with a stand-in for CUDA graphs: recorded launches, pieces, and errors in a capture."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from minisgl.plugins.graph.replaying.record import Recorder
from minisgl.plugins.kernels.ops.launch import between_pieces


class FakeCudaGraph:
    """Stand-in for torch.cuda.CUDAGraph with its rules.

    Only one capture runs at a time. An error during a capture invalidates it, and the end of an invalid capture raises.
    ``calls`` collects what replays launch and what runs eagerly.
    """

    capturing: FakeCudaGraph | None = None
    calls: list[str]

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert FakeCudaGraph.capturing is None
        FakeCudaGraph.capturing, self.invalid, self.launches = self, False, []

    def capture_end(self) -> None:
        if FakeCudaGraph.capturing is not self:
            raise RuntimeError("capture_end without capture_begin")
        FakeCudaGraph.capturing = None
        if self.invalid:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        FakeCudaGraph.calls.append("".join(self.launches))


def launch(name: str) -> None:
    """Launch a fake kernel: it is recorded if a capture is running."""
    if FakeCudaGraph.capturing is not None:
        FakeCudaGraph.capturing.launches.append(name)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeCudaGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    FakeCudaGraph.capturing, FakeCudaGraph.calls = None, []
    return Recorder(torch.device("cuda"))


def from_second_call(act: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls ``act`` from its second call on. The first call is the run before the recording."""
    calls: list[None] = []

    def call() -> None:
        calls.append(None)
        if len(calls) > 1:
            act()

    return call


def test_calls_between_pieces(recorder: Recorder) -> None:
    """A replay in pieces calls functions marked `between_pieces` again; recorded as one graph, they are not called."""

    @between_pieces
    def attend(name: str) -> None:
        assert FakeCudaGraph.capturing is None or not in_pieces
        FakeCudaGraph.calls.append(name)

    def forward(inputs: None) -> torch.Tensor:
        launch("a")
        attend("A")
        launch("b")
        attend("B")
        launch("c")
        return torch.ones(1)

    in_pieces = True
    recording = recorder.record(forward, None, piecewise=True)
    FakeCudaGraph.calls = []
    assert recording.replay() is recording.out
    assert FakeCudaGraph.calls == ["a", "A", "b", "B", "c"]
    in_pieces = False
    whole = recorder.record(forward, None)
    FakeCudaGraph.calls = []
    whole.replay()
    assert FakeCudaGraph.calls == ["abc"]


@pytest.mark.parametrize("piecewise", [False, True])
@pytest.mark.parametrize("failing_part", ["inside", "between"])
@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, AssertionError])
def test_error_while_recording(recorder: Recorder, piecewise: bool, failing_part: str, kind: type[Exception]) -> None:
    """An error during the recording is raised unchanged, the capture is ended, and garbage collection is on again."""

    def fail() -> None:
        if FakeCudaGraph.capturing is not None:
            FakeCudaGraph.capturing.invalid = True
        raise kind("out of memory in this call")

    fail_when_recorded = from_second_call(fail)

    @between_pieces
    def attend() -> None:
        if failing_part == "between":
            fail_when_recorded()

    def forward(inputs: None) -> torch.Tensor:
        attend()
        if failing_part == "inside":
            fail_when_recorded()
        return torch.ones(1)

    with pytest.raises(kind, match="out of memory in this call"):
        recorder.record(forward, None, piecewise=piecewise)
    assert FakeCudaGraph.capturing is None
    assert gc.isenabled()


def test_gc_stays_disabled(recorder: Recorder) -> None:
    """Recording does not enable a garbage collector that was disabled before."""
    gc.disable()
    try:
        recorder.record(lambda inputs: torch.ones(1), None)
        assert not gc.isenabled()
    finally:
        gc.enable()
