"""Tests of `Drive`: it reports every scheduler whose outputs are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minisgl.core import EngineSpec, Finished, InvalidRequestError, Output, SamplingParams
from minisgl.plugins.cache.naive import NaiveCache
from minisgl.scheduler.cache_manager import CacheManager
from minisgl.scheduler.observer import Observer
from minisgl.testing.drive import Drive, Job, make_plugin
from minisgl.testing.truth import expected_output

SPEC = EngineSpec(page_size=4, num_pages=8, max_running_requests=2, max_seq_len=24, vocab_size=50)
JOB = Job(1, [1, 2, 3], SamplingParams(max_tokens=2, temperature=0.0))
RIGHT = expected_output(JOB.request, SPEC.vocab_size).tokens


def reply(reason: Any = "length", **more: Any) -> Finished:
    values: dict[str, Any] = {"uid": 1, "finish_reason": reason, "prompt_tokens": 3, "output_tokens": 2, **more}
    return Finished(**values)


class Script:
    """A scheduler that returns the given outputs, one per step, and schedules nothing.

    With ``refuse``, it rejects every request. With ``last=False``, it never becomes idle.
    """

    def __init__(self, *outputs: Output, refuse: bool = False, last: bool = True):
        self.outputs, self.refuse, self.last = list(outputs), refuse, last
        self.requests, self.in_flight = (), ()
        self.cache_manager = CacheManager(SPEC, Observer())

    def __call__(self, engine: Any, *_: Any, **__: Any) -> Script:
        engine.counts.admissions[1], engine.counts.computed_by[1] = 1, 4
        return self

    def add_request(self, uid: int, prompt: Any, params: SamplingParams) -> None:
        if self.refuse:
            raise InvalidRequestError("prompt", "The test rejects every request.")

    def abort_request(self, uid: int) -> None:
        pass

    def step(self) -> Output:
        return self.outputs.pop(0) if self.outputs else Output()

    @property
    def has_work(self) -> bool:
        return bool(self.outputs) or not self.last


TOKENS = Output([1, 1], RIGHT)
COMPLETE = Output([1, 1], RIGHT, [reply()])

WRONG: dict[str, tuple[Callable[[], Script], str]] = {
    "a wrong token": (lambda: Script(Output([1], [RIGHT[0] ^ 1])), "promise 8: output token 0 of request 1"),
    "a token too many": (lambda: Script(TOKENS, Output([1], [5])), "more than its 2 expected tokens"),
    "a token too few": (lambda: Script(Output([1], RIGHT[:1], [reply(output_tokens=1)])), "promise 8"),
    "two replies": (lambda: Script(COMPLETE, Output(finished=[reply()])), "promise 1: a second"),
    "a token after the reply": (lambda: Script(COMPLETE, Output([1], [5])), "promise 1: request 1 gained a token"),
    "no reply": (lambda: Script(TOKENS), "promise 1: the scheduler is idle, but"),
    "no end": (lambda: Script(TOKENS, last=False), "stuck"),
    "a reply to an unknown request": (lambda: Script(Output(finished=[reply(uid=2)])), "never accepted"),
    "a token for an unknown request": (lambda: Script(Output([2], [5])), "never accepted"),
    "the wrong reason": (lambda: Script(Output([1, 1], RIGHT, [reply("stop")])), "ended with .finish_reason, stop_id."),
    "an abort that was not requested": (lambda: Script(Output([1, 1], RIGHT, [reply("abort")])), "it was not aborted"),
    "an error without a cause": (
        lambda: Script(Output([1, 1], RIGHT, [reply("error", error="oops")])),
        "ended with .finish_reason, stop_id.",
    ),
    "prompt tokens miscounted": (
        lambda: Script(Output([1, 1], RIGHT, [reply(prompt_tokens=4)])),
        "usage: prompt_tokens of request 1 is 4",
    ),
    "output tokens miscounted": (
        lambda: Script(Output([1, 1], RIGHT, [reply(output_tokens=1)])),
        "usage: output_tokens of request 1 is 1",
    ),
    "a completely cached prompt": (
        lambda: Script(Output([1, 1], RIGHT, [reply(cached_tokens=3)])),
        "usage: cached_tokens of request 1 is 3",
    ),
    "cached tokens that were computed": (
        lambda: Script(Output([1, 1], RIGHT, [reply(cached_tokens=2)])),
        "usage: cached_tokens of request 1 is 2",
    ),
    "a rejection without a reason": (lambda: Script(refuse=True), "promise 2: request 1 can be served"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_outputs(mistake: str) -> None:
    """`Drive` finds each mistake of a scheduler, and accepts the correct output."""
    script, message = WRONG[mistake]
    policy = make_plugin("scheduler", "mixed")
    Drive(SPEC, NaiveCache(), policy, scheduler=Script(COMPLETE)).run([JOB])
    with pytest.raises(AssertionError, match=message):
        Drive(SPEC, NaiveCache(), policy, scheduler=script()).run([JOB])


def test_missing_rejection() -> None:
    """`Drive` finds a scheduler that queues a request that it can never serve."""
    drive = Drive(SPEC, NaiveCache(), make_plugin("scheduler", "mixed"), scheduler=Script())
    for job in (Job(1, []), Job(2, [1] * 20, SamplingParams(max_tokens=5)), Job(3, [50])):
        with pytest.raises(AssertionError, match="was queued, although"):
            drive.add(job)


def test_ignored_abort() -> None:
    """`Drive` finds a scheduler that does not finish an aborted request."""
    drive = Drive(SPEC, NaiveCache(), make_plugin("scheduler", "mixed"), scheduler=Script(last=False))
    drive.add(JOB)
    drive.abort(1)
    with pytest.raises(AssertionError, match="the step did not finish them"):
        drive.step()


def test_arrival_and_abort() -> None:
    """`Drive.run` sends and aborts requests at the steps that their `Job` gives."""
    drive = Drive(SPEC, NaiveCache(), make_plugin("scheduler", "mixed"), overlap=False)
    long = SamplingParams(max_tokens=20, temperature=0.0)
    report = drive.run([Job(1, [1, 2], long), Job(2, [3, 4], long, arrive=2, abort=5)])
    assert report.first_token == {1: 0, 2: 2}
    assert (report.finished[2].finish_reason, len(report.tokens[2])) == ("abort", 3)
    assert (report.finished[1].finish_reason, len(report.tokens[1])) == ("length", 20)
