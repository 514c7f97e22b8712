"""The judge of the scheduler, judged: a scheduler that answers wrongly is found out, whatever its engine did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minisgl.core import EngineSpec, Finished, InvalidRequestError, Output, SamplingParams
from minisgl.plugins.cache.naive import NaiveCache
from minisgl.testing.drive import Drive, Job, make_plugin
from minisgl.testing.truth import expected_output

SPEC = EngineSpec(page_size=4, num_pages=8, max_running_requests=2, max_seq_len=24, vocab_size=50)
JOB = Job(1, [1, 2, 3], SamplingParams(max_tokens=2, temperature=0.0))
RIGHT = expected_output(JOB.ask, SPEC.vocab_size).tokens


def end(reason: Any = "length", **more: Any) -> Finished:
    values: dict[str, Any] = {"uid": 1, "reason": reason, "prompt_tokens": 3, "output_tokens": 2, **more}
    return Finished(**values)


class Script:
    """A scheduler that says what it was told to, one output a step, and does nothing."""

    def __init__(self, *outputs: Output, refuse: bool = False, last: bool = True):
        self.outputs, self.refuse, self.last = list(outputs), refuse, last

    def __call__(self, engine: Any, *_: Any, **__: Any) -> Script:
        engine.counts.seats[1], engine.counts.computed_by[1] = 1, 4
        return self

    def add(self, uid: int, prompt: Any, params: SamplingParams) -> None:
        if self.refuse:
            raise InvalidRequestError("prompt", "I don't like it.")

    def abort(self, uid: int) -> None:
        pass

    def step(self) -> Output:
        return self.outputs.pop(0) if self.outputs else Output()

    @property
    def has_work(self) -> bool:
        return bool(self.outputs) or not self.last

    def check_idle(self) -> None:
        pass


TOKENS = Output([1, 1], RIGHT)
WHOLE = Output([1, 1], RIGHT, [end()])

LIES: dict[str, tuple[Callable[[], Script], str]] = {
    "a wrong token": (lambda: Script(Output([1], [RIGHT[0] ^ 1])), "promise 8: token 0"),
    "a token too many": (lambda: Script(TOKENS, Output([1], [5])), "more than its 2 tokens"),
    "a token too few": (lambda: Script(Output([1], RIGHT[:1], [end(output_tokens=1)])), "promise 8"),
    "two replies": (lambda: Script(WHOLE, Output(finished=[end()])), "promise 1: a second"),
    "a token after the reply": (lambda: Script(WHOLE, Output([1], [5])), "promise 1: request 1 gained a token"),
    "no reply": (lambda: Script(TOKENS), "promise 1: idle, but"),
    "no end": (lambda: Script(TOKENS, last=False), "stuck"),
    "a reply to nobody": (lambda: Script(Output(finished=[end(uid=2)])), "never accepted"),
    "a token for nobody": (lambda: Script(Output([2], [5])), "never accepted"),
    "the wrong reason": (lambda: Script(Output([1, 1], RIGHT, [end("stop")])), "ended by"),
    "an abort that nobody asked for": (lambda: Script(Output([1, 1], RIGHT, [end("abort")])), "still there"),
    "an error without a cause": (lambda: Script(Output([1, 1], RIGHT, [end("error", error="oops")])), "oops"),
    "prompt tokens miscounted": (lambda: Script(Output([1, 1], RIGHT, [end(prompt_tokens=4)])), "usage: 4 prompt"),
    "output tokens miscounted": (lambda: Script(Output([1, 1], RIGHT, [end(output_tokens=1)])), "usage: 1 output"),
    "a prompt cached whole": (lambda: Script(Output([1, 1], RIGHT, [end(cached_tokens=3)])), "usage: 3 cached"),
    "cached tokens that were computed": (lambda: Script(Output([1, 1], RIGHT, [end(cached_tokens=2)])), "usage: 2"),
    "a refusal without a reason": (lambda: Script(refuse=True), "promise 2: refused without"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_scheduler_that_answers_wrongly_is_found_out(lie: str) -> None:
    script, message = LIES[lie]
    policy = make_plugin("scheduler", "mixed")
    Drive(SPEC, NaiveCache(), policy, scheduler=Script(WHOLE)).run([JOB])
    with pytest.raises(AssertionError, match=message):
        Drive(SPEC, NaiveCache(), policy, scheduler=script()).run([JOB])


def test_what_can_not_be_served_must_be_refused() -> None:
    drive = Drive(SPEC, NaiveCache(), make_plugin("scheduler", "mixed"), scheduler=Script())
    for job in (Job(1, []), Job(2, [1] * 20, SamplingParams(max_tokens=5)), Job(3, [50])):
        with pytest.raises(AssertionError, match="was queued, although"):
            drive.add(job)


def test_a_hang_up_without_a_reply_is_found_out() -> None:
    drive = Drive(SPEC, NaiveCache(), make_plugin("scheduler", "mixed"), scheduler=Script(last=False))
    drive.add(JOB)
    drive.abort(1)
    with pytest.raises(AssertionError, match="hung up a step ago"):
        drive.step()


def test_a_job_arrives_and_hangs_up_when_it_says() -> None:
    drive = Drive(SPEC, NaiveCache(), make_plugin("scheduler", "mixed"), overlap=False)
    long = SamplingParams(max_tokens=20, temperature=0.0)
    report = drive.run([Job(1, [1, 2], long), Job(2, [3, 4], long, arrive=2, abort=5)])
    assert report.first_token == {1: 0, 2: 2}
    assert (report.finished[2].finish_reason, len(report.tokens[2])) == ("abort", 3)
    assert (report.finished[1].finish_reason, len(report.tokens[1])) == ("length", 20)
