"""Recording on a GPU, with a stand-in for its graphs: what is captured, and what a failure inside leaves behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from minisgl.engine.record import Recorder
from minisgl.kernel.launch import between_pieces


class Graph:
    """As CUDA's: one capture at a time; what fails inside spoils it, and the end of a spoilt one raises too."""

    now: Graph | None = None
    seen: list[str]

    def capture_begin(self, pool: Any) -> None:
        assert Graph.now is None
        Graph.now, self.spoilt, self.inside = self, False, []

    def capture_end(self) -> None:
        if Graph.now is not self:
            raise RuntimeError("capture_end without capture_begin")
        Graph.now = None
        if self.spoilt:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        Graph.seen.append("".join(self.inside))


def launch(name: str) -> None:
    if Graph.now is not None:
        Graph.now.inside.append(name)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    Graph.now, Graph.seen = None, []
    return Recorder(torch.device("cuda"))


def second_time(act: Callable[[], None]) -> Callable[[], None]:
    """Acts from the second call on: the first is the run that is not recorded."""
    calls: list[None] = []

    def call() -> None:
        calls.append(None)
        if len(calls) > 1:
            act()

    return call


def test_what_lies_between_pieces_is_called_anew(recorder: Recorder) -> None:
    @between_pieces
    def attend(who: str) -> None:
        assert Graph.now is None or not in_pieces
        Graph.seen.append(who)

    def forward(inputs: None) -> torch.Tensor:
        launch("a")
        attend("A")
        launch("b")
        attend("B")
        launch("c")
        return torch.ones(1)

    in_pieces = True
    recording = recorder.record(forward, None, piecewise=True)
    Graph.seen = []
    assert recording.replay() is recording.out
    assert Graph.seen == ["a", "A", "b", "B", "c"]
    in_pieces = False
    whole = recorder.record(forward, None)
    Graph.seen = []
    whole.replay()
    assert Graph.seen == ["abc"]


@pytest.mark.parametrize("piecewise", [False, True])
@pytest.mark.parametrize("where", ["inside", "between"])
@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, AssertionError])
def test_a_failure_while_recording_is_the_one_that_is_raised(
    recorder: Recorder, piecewise: bool, where: str, kind: type[Exception]
) -> None:
    """With its own words, the capture ended, and the collector on again."""

    def fail() -> None:
        if Graph.now is not None:
            Graph.now.spoilt = True
        raise kind("no room for this")

    failing = second_time(fail)

    @between_pieces
    def attend() -> None:
        if where == "between":
            failing()

    def forward(inputs: None) -> torch.Tensor:
        attend()
        if where == "inside":
            failing()
        return torch.ones(1)

    with pytest.raises(kind, match="no room for this"):
        recorder.record(forward, None, piecewise=piecewise)
    assert Graph.now is None
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off(recorder: Recorder) -> None:
    gc.disable()
    try:
        recorder.record(lambda inputs: torch.ones(1), None)
        assert not gc.isenabled()
    finally:
        gc.enable()
