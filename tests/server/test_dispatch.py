"""The dispatcher: every request gets one final reply, whoever sends what."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import zmq

from minisgl.core import EngineSpec, Finished, SamplingParams
from minisgl.message import (
    Abort,
    Accepted,
    Addresses,
    Delta,
    GetStats,
    Limits,
    Pull,
    Push,
    Replies,
    Stats,
    Stop,
    Submit,
    TextPrompt,
)
from minisgl.server.dispatch import Dispatcher, Stream
from minisgl.server.errors import ApiError

SPEC = EngineSpec(page_size=4, num_pages=10, max_running_requests=8, max_seq_len=64, vocab_size=320)
PROMPT = TextPrompt("x")


class World:
    """A dispatcher and the inboxes of all to whom it sends."""

    def __init__(self, tokenizers: int = 2, max_open: int = 100):
        self.addresses = Addresses.make(tokenizers, 1)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.dispatcher = Dispatcher(self.addresses, max_open)
        self.tokenizers = [Pull(self.context, address) for address in self.addresses.tokenizers]
        self.scheduler = Pull(self.context, self.addresses.scheduler)
        self.api = Push(self.context, self.addresses.api)
        self.dispatcher.begin(SPEC)

    async def get(self, inbox: Pull) -> object:
        return await asyncio.to_thread(inbox.receive)

    def reply(self, *deltas: Delta) -> None:
        self.api.send(Replies(list(deltas)))

    def close(self) -> None:
        self.dispatcher.close()
        self.context.destroy(linger=0)
        self.addresses.remove()


def in_world(test: Callable[[World], Awaitable[None]], **kwargs: int) -> None:
    async def run() -> None:
        world = World(**kwargs)
        try:
            async with asyncio.timeout(20):
                await test(world)
        finally:
            world.close()

    asyncio.run(run())


async def everything(stream: Stream) -> list[tuple[int, Delta]]:
    events = []
    while not stream.done:
        events += await stream.get()
    return events


def end(uid: int) -> Delta:
    return Delta(uid, finish=Finished(uid, "length"))


def test_prompts_and_choices_are_numbered_and_replies_find_them() -> None:
    async def test(world: World) -> None:
        stream = world.dispatcher.submit([PROMPT, PROMPT], SamplingParams(n=2), fill=False)
        assert world.dispatcher.open == 4
        inbox = world.tokenizers[stream.worker]
        assert await world.get(inbox) == Limits(41, 320)  # ten pages of four, and the last token's KV is not stored
        first, second = await world.get(inbox), await world.get(inbox)
        assert isinstance(first, Submit)
        assert isinstance(second, Submit)
        assert [*first.uids, *second.uids] == stream.uids
        world.api.send(Accepted(stream.uids))
        await stream.accepted()
        a, b, c, d = stream.uids
        world.reply(Delta(c, "x"), Delta(a, "y"))
        world.reply(end(d), Delta(c, "z"), end(b), end(c), end(a))
        events = await everything(stream)
        assert [(i, delta.text) for i, delta in events] == [
            (2, "x"),
            (0, "y"),
            (3, ""),
            (2, "z"),
            (1, ""),
            (2, ""),
            (0, ""),
        ]
        assert world.dispatcher.open == 0
        assert await world.dispatcher.idle(0.0)

    in_world(test)


def test_promise_1_a_second_final_reply_is_not_passed_on() -> None:
    async def test(world: World) -> None:
        stream = world.dispatcher.submit([PROMPT], SamplingParams(), fill=False)
        (uid,) = stream.uids
        world.reply(end(uid), end(uid), Delta(uid, "late"))
        world.reply(end(uid), end(12345))
        events = await everything(stream)
        await asyncio.sleep(0.05)
        world.dispatcher.fail("too late")
        assert [delta for _, delta in events] == [end(uid)]
        assert stream.peek() == []

    in_world(test)


def test_promise_1_when_all_fails_every_open_request_and_question_ends() -> None:
    async def test(world: World) -> None:
        streams = [world.dispatcher.submit([PROMPT], SamplingParams(n=3), fill=False) for _ in range(3)]
        questions = [
            asyncio.create_task(world.dispatcher.stats()),
            asyncio.create_task(world.dispatcher.count(PROMPT, False)),
        ]
        await asyncio.sleep(0)
        world.reply(end(streams[0].uids[1]))
        assert await streams[0].get() == [(1, end(streams[0].uids[1]))]
        world.dispatcher.fail("the engine died")
        for stream in streams:
            ends = [delta.finish for _, delta in await everything(stream)]
            assert {(e.finish_reason, e.status, e.error) for e in ends if e} == {("error", 500, "the engine died")}
            assert len(ends) == (2 if stream is streams[0] else 3)
        for question in questions:
            with pytest.raises(ApiError, match="the engine died"):
                await question

    in_world(test)


def test_an_abort_goes_the_way_of_its_requests_and_names_only_those_that_are_open() -> None:
    async def test(world: World) -> None:
        streams = [world.dispatcher.submit([PROMPT], SamplingParams(n=2), fill=False) for _ in range(4)]
        assert {stream.worker for stream in streams} == {0, 1}
        world.reply(end(streams[3].uids[0]))
        await streams[3].get()
        for stream in streams:
            world.dispatcher.abort(stream)
            world.dispatcher.abort(stream)  # a second time: nothing
        for worker in (0, 1):
            inbox, mine = world.tokenizers[worker], [s for s in streams if s.worker == worker]
            assert isinstance(await world.get(inbox), Limits)
            assert [(await world.get(inbox)).uids for _ in mine] == [s.uids for s in mine]  # type: ignore[attr-defined]
            for stream in mine:
                open_ones = stream.uids[1:] if stream is streams[3] else stream.uids
                assert await world.get(inbox) == Abort(open_ones)
            assert not inbox.ready()
        assert await world.dispatcher.idle(0.0)

    in_world(test)


def test_new_requests_hear_what_state_the_server_is_in() -> None:
    async def test(world: World) -> None:
        dispatcher = world.dispatcher
        dispatcher.submit([PROMPT], SamplingParams(n=3), fill=False)
        with pytest.raises(ApiError, match="Too many requests are open") as error:
            dispatcher.submit([PROMPT, PROMPT], SamplingParams(), fill=False)
        assert (error.value.status, error.value.code) == (503, "overloaded")
        dispatcher.submit([PROMPT], SamplingParams(), fill=False)
        dispatcher.state, dispatcher.reason = "draining", "Going home."
        with pytest.raises(ApiError, match="Going home") as error:
            dispatcher.submit([PROMPT], SamplingParams(), fill=False)
        assert error.value.status == 503

    in_world(test, max_open=4)


def test_questions_get_their_own_answers() -> None:
    async def test(world: World) -> None:
        one, other = (asyncio.create_task(world.dispatcher.stats()) for _ in range(2))
        first, second = await world.get(world.scheduler), await world.get(world.scheduler)
        assert isinstance(first, GetStats)
        assert isinstance(second, GetStats)
        world.api.send(Stats(second.uid, {"x": 2.0}))
        world.api.send(Stats(first.uid, {"x": 1.0}))
        world.api.send(Stats(first.uid, {"x": 9.0}))
        assert [(await task).values["x"] for task in (one, other)] == [1.0, 2.0]

    in_world(test)


def test_stop_reaches_everybody() -> None:
    async def test(world: World) -> None:
        world.dispatcher.stop()
        assert await world.get(world.scheduler) == Stop()
        for inbox in world.tokenizers:
            assert [await world.get(inbox) for _ in range(2)] == [Limits(41, 320), Stop()]

    in_world(test)


def test_many_replies_do_not_starve_the_event_loop() -> None:
    async def test(world: World) -> None:
        stream = world.dispatcher.submit([PROMPT], SamplingParams(), fill=False)
        for _ in range(5000):
            world.reply(Delta(stream.uids[0], "x"))
        world.reply(end(stream.uids[0]))
        events = await everything(stream)
        assert len(events) == 5001

    in_world(test)
