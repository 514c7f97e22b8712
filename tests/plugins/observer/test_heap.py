"""`plugins/observer/heap.py`: an idle server returns free memory, but not between two requests close to each other."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from minisgl.plugins.observer import heap
from minisgl.plugins.observer.heap import HeapTrimmer, minisgl_observer


class Clock(threading.Event):
    """An event whose wait with a time limit runs the next function of a script: what happens within this time."""

    def __init__(self, script: list[Callable[[], None]]) -> None:
        super().__init__()
        self.script = script

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout == heap.IDLE_SECONDS
        if self.script:
            self.script.pop(0)()
        return self.is_set()


@pytest.mark.parametrize(
    ("waits", "trims"),
    [
        ([""], 1),
        (["+"], 0),  # a request has come, and is still open
        (["+-", ""], 1),
        (["+-", "+"], 0),
        (["+", "-", ""], 0),  # trimmed after the end of the other one
    ],
)
def test_heap_is_trimmed_once_after_work(waits: list[str], trims: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request ends; in each wait for a second then, requests come (+) and end (-)."""
    monkeypatch.setattr(HeapTrimmer, "_run", lambda self: None)
    calls: list[None] = []
    monkeypatch.setattr(heap, "trim_heap", lambda: calls.append(None))
    trimmer = HeapTrimmer()

    def happens(what: str) -> Callable[[], None]:
        def happen() -> None:
            for sign in what:
                (trimmer.minisgl_request_added if sign == "+" else trimmer.minisgl_request_finished)()

        return happen

    trimmer._ended = Clock([happens(what) for what in waits])
    trimmer.minisgl_request_added()
    trimmer.minisgl_request_finished()
    trimmer.trim_when_idle()
    assert len(calls) == trims


def test_the_thread_trims_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed = threading.Event()
    monkeypatch.setattr(heap, "IDLE_SECONDS", 0.001)
    monkeypatch.setattr(heap, "trim_heap", trimmed.set)
    trimmer = HeapTrimmer()
    trimmer.minisgl_request_added()
    trimmer.minisgl_request_finished()
    assert trimmed.wait(60)
    trimmer.minisgl_closed()
    for thread in threading.enumerate():
        if thread.name == "heap-trimmer":
            thread.join(60)
            assert not thread.is_alive()


def test_an_llm_has_none() -> None:
    assert minisgl_observer(None) is None
