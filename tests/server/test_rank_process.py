"""Tests of the loop of rank 0's process: when the choices of a prompt arrive, and during a verification."""

from __future__ import annotations

from collections.abc import Iterator

from minisgl.core import I32, InvalidRequestError, Output, SamplingParams
from minisgl.message import Accepted, Message, Replies, Schedule, Stop, pack_ids
from minisgl.plugin_manager.manager import PluginManager
from minisgl.server.rank_process import SchedulerLoop


class Inbox:
    """The messages of a script. `None` is a pause that is longer than any wait."""

    def __init__(self, script: list[Message | None]):
        self.script = script
        self.arrived: list[Message] = []  # given to a call of `drain` that does not block

    def wait(self, seconds: float) -> bool:
        assert seconds > 0
        return self.script[0] is not None

    def drain(self, block: bool) -> Iterator[Message]:
        if not block:
            yield from self.arrived
            self.arrived.clear()
            return
        while self.script[0] is None:
            self.script.pop(0)
        yield self.script.pop(0)  # type: ignore[misc]


class OneStepPerMessage:
    """A scheduler to which every request for statistics brings one step of work."""

    has_work = False

    def stats(self) -> dict[str, float]:
        self.has_work = True
        return {}

    def read_verification(self) -> None: ...

    def step(self) -> Output:
        self.has_work = False
        return Output()


class Recorder(OneStepPerMessage):
    """A scheduler that keeps the requests that are added, and refuses those with the uid 7."""

    def __init__(self) -> None:
        self.added: list[tuple[int, I32, SamplingParams]] = []

    def add_request(self, uid: int, prompt_ids: I32, params: SamplingParams) -> None:
        if uid == 7:
            raise InvalidRequestError("prompt", "no")
        self.added.append((uid, prompt_ids, params))


def test_choices_share_the_prompt() -> None:
    """The choices of a prompt are one array in rank 0's process; each has its own seed, and is refused alone."""
    scheduler, sent = Recorder(), []
    params = SamplingParams(n=3, seed=5, prompt_logprobs=1)
    loop = SchedulerLoop(
        scheduler,  # type: ignore[arg-type]
        Inbox([Schedule([6, 7, 8], pack_ids([1, 2, 3]), params), Stop()]),  # type: ignore[arg-type]
        to_api=sent.append,
        to_detokenizer=sent.append,
        manager=PluginManager.load(light=True),
    )
    loop.run()
    assert [(uid, p.seed, p.prompt_logprobs) for uid, _, p in scheduler.added] == [(6, 5, 1), (8, 7, None)]
    assert scheduler.added[0][1] is scheduler.added[1][1]
    assert [delta.uid for message in sent if isinstance(message, Replies) for delta in message.deltas] == [7]
    assert [message.uids for message in sent if isinstance(message, Accepted)] == [[6, 8]]


class ArrivesDuringTheWait(Recorder):
    """A scheduler with one step in flight, during whose result a request arrives."""

    has_work = True

    def __init__(self, inbox: Inbox) -> None:
        super().__init__()
        self.inbox, self.calls = inbox, list[str]()

    def read_verification(self) -> None:
        self.calls.append("read")
        self.inbox.arrived.append(Schedule([6], pack_ids([1, 2, 3]), SamplingParams()))

    def add_request(self, uid: int, prompt_ids: I32, params: SamplingParams) -> None:
        self.calls.append("add")

    def step(self) -> Output:
        self.calls.append("step")
        return super().step()


def test_requests_that_arrive_during_a_verification_join_the_next_step() -> None:
    """The loop waits for the result of a verification before it reads messages, not between messages and step."""
    inbox = Inbox([Stop()])
    scheduler = ArrivesDuringTheWait(inbox)
    loop = SchedulerLoop(
        scheduler,  # type: ignore[arg-type]
        inbox,  # type: ignore[arg-type]
        to_api=lambda message: None,
        to_detokenizer=lambda message: None,
        manager=PluginManager.load(light=True),
    )
    loop.run()
    assert scheduler.calls == ["read", "add", "step"]
