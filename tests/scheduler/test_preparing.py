"""Requests whose grammar is still being compiled: they wait outside of the queue, and other requests go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from minisgl.core import I32
from minisgl.testing.drive import Drive
from minisgl.testing.fake_grammar import FakeGrammar
from minisgl.testing.small import SPEC, job, make
from minisgl.testing.truth import SimRequest


class Gated(FakeGrammar):
    """A grammar that is not ready before ``ready`` is set. The simulated engine checks that its masks are obeyed."""

    def __init__(self, request: SimRequest) -> None:
        super().__init__(request, SPEC.vocab_size)
        self.ready = False
        self.waits: list[float] = []

    def is_ready(self, seconds: float = 0.0) -> bool:
        self.waits.append(seconds)
        return self.ready

    def masks(self, drafts: Sequence[int]) -> I32:
        assert self.ready, "a step waits for a grammar that is not compiled"
        return super().masks(drafts)


def with_gate(**options: Any) -> tuple[Drive, Gated]:
    """Return a drive with an open request, number 1, whose grammar is not ready."""
    first = job(1, grammar=3)
    gate = Gated(first.request)
    drive = make(**options)
    drive.scheduler.constraint_of = lambda req: gate if req.uid == 1 else None
    drive.add(first)
    return drive, gate


@pytest.mark.parametrize("overlap", [True, False])
def test_other_rows_go_on(overlap: bool) -> None:
    drive, gate = with_gate(overlap=overlap)
    drive.add(job(2))
    assert drive.scheduler.stats()["num_waiting_reqs"] == 2
    while 2 not in drive.report.finished:
        drive.step()
    assert 1 not in drive.report.finished
    assert not drive.report.tokens[1]
    assert not any(gate.waits), "a step waited although another request was open"
    while not gate.waits[-1]:  # until nothing else is to be done
        drive.step()
    gate.ready = True
    drive.run([])
    assert drive.report.finished[1].finish_reason == "length"


def test_the_order_of_arrival_is_kept() -> None:
    """A request that was prepared takes its place before requests that arrived later."""
    drive, gate = with_gate()
    drive.add(job(2))
    gate.ready = True
    drive.step()
    assert drive.scheduler.requests[1].admission_order < drive.scheduler.requests[2].admission_order
    drive.run([])


def test_abort() -> None:
    drive, _ = with_gate()
    drive.abort(1)
    drive.step()
    assert drive.report.finished[1].finish_reason == "abort"
    drive.run([])


def test_failure() -> None:
    drive, _ = with_gate()
    drive.fail("broken")
    assert drive.report.finished[1].finish_reason == "error"
    assert drive.scheduler.stats()["num_waiting_reqs"] == 0
