"""The dispatcher: every request gets exactly one final reply, whatever messages arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import zmq

from minisgl.core import EngineSpec, Finished, InvalidRequestError, SamplingParams
from minisgl.message import (
    Abort,
    Accepted,
    Call,
    Delta,
    Limits,
    Replies,
    Stop,
    Submit,
    TextPrompt,
    TokensPrompt,
)
from minisgl.message.queue import Addresses, Pull, Push
from minisgl.plugins.http.apis.queries import ask_stats, ask_tokens
from minisgl.scheduler.waiting_queue import check_request
from minisgl.server.dispatch import Dispatcher
from minisgl.server.errors import ApiError
from minisgl.server.request_record import Stream

from .conftest import answer

SPEC = EngineSpec(page_size=4, num_pages=10, max_running_requests=8, max_seq_len=64, vocab_size=320)
PROMPT = TextPrompt("x")


class FakeServer:
    """A dispatcher, and the sockets of the worker processes; the test itself acts as the workers."""

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


def with_fake_server(test: Callable[[FakeServer], Awaitable[None]], **kwargs: int) -> None:
    async def run() -> None:
        server = FakeServer(**kwargs)
        try:
            async with asyncio.timeout(100):
                await test(server)
        finally:
            server.close()

    asyncio.run(run())


async def everything(stream: Stream) -> list[tuple[int, Delta]]:
    events = []
    while not stream.done:
        events += await stream.get()
    return events


def end(uid: int) -> Delta:
    return Delta(uid, finish=Finished(uid, "length"))


def test_replies_reach_their_choice() -> None:
    """The choices of all prompts are numbered in one sequence, and each reply goes to its choice."""

    async def test(server: FakeServer) -> None:
        stream = server.dispatcher.submit([PROMPT, PROMPT], SamplingParams(n=2), max_tokens_from_context=False)
        assert server.dispatcher.num_open == 4
        inbox = server.tokenizers[stream.tokenizer]
        assert await server.get(inbox) == Limits(
            41, 320
        )  # 10 pages of 4 tokens, plus the last token, whose KV is not stored
        first, second = await server.get(inbox), await server.get(inbox)
        assert isinstance(first, Submit)
        assert isinstance(second, Submit)
        assert [*first.uids, *second.uids] == stream.uids
        server.api.send(Accepted(stream.uids, [3] * len(stream.uids)))
        await stream.wait_until_accepted()
        a, b, c, d = stream.uids
        server.reply(Delta(c, "x"), Delta(a, "y"))
        server.reply(end(d), Delta(c, "z"), end(b), end(c), end(a))
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
        assert server.dispatcher.num_open == 0
        assert await server.dispatcher.wait_until_idle(0.0)

    with_fake_server(test)


def test_promise_1_second_final_reply_is_dropped() -> None:
    async def test(server: FakeServer) -> None:
        stream = server.dispatcher.submit([PROMPT], SamplingParams(), max_tokens_from_context=False)
        (uid,) = stream.uids
        server.reply(end(uid), end(uid), Delta(uid, "late"))
        server.reply(end(uid), end(12345))
        events = await everything(stream)
        await asyncio.sleep(0.05)
        server.dispatcher.fail("too late")
        assert [delta for _, delta in events] == [end(uid)]
        assert stream.peek() == []

    with_fake_server(test)


def test_promise_1_fail_ends_all_requests_and_queries() -> None:
    """`Dispatcher.fail` ends every open request and every pending query with an error."""

    async def test(server: FakeServer) -> None:
        streams = [
            server.dispatcher.submit([PROMPT], SamplingParams(n=3), max_tokens_from_context=False) for _ in range(3)
        ]
        queries = [
            asyncio.create_task(ask_stats(server.dispatcher)),
            asyncio.create_task(ask_tokens(server.dispatcher, PROMPT)),
        ]
        await asyncio.sleep(0)
        server.reply(end(streams[0].uids[1]))
        assert await streams[0].get() == [(1, end(streams[0].uids[1]))]
        server.dispatcher.fail("the engine died")
        for stream in streams:
            ends = [delta.finish for _, delta in await everything(stream)]
            assert {(e.finish_reason, e.status, e.error) for e in ends if e} == {("error", 500, "the engine died")}
            assert len(ends) == (2 if stream is streams[0] else 3)
        for query in queries:
            with pytest.raises(ApiError, match="the engine died"):
                await query

    with_fake_server(test)


def test_abort_message() -> None:
    """An `Abort` goes to the tokenizer that got the requests, and has only those requests that are still open."""

    async def test(server: FakeServer) -> None:
        streams = [
            server.dispatcher.submit([PROMPT], SamplingParams(n=2), max_tokens_from_context=False) for _ in range(4)
        ]
        assert {stream.tokenizer for stream in streams} == {0, 1}
        server.reply(end(streams[3].uids[0]))
        await streams[3].get()
        for stream in streams:
            server.dispatcher.abort(stream)
            server.dispatcher.abort(stream)  # a second abort sends no message
        for worker in (0, 1):
            inbox, mine = server.tokenizers[worker], [s for s in streams if s.tokenizer == worker]
            assert isinstance(await server.get(inbox), Limits)
            assert [(await server.get(inbox)).uids for _ in mine] == [s.uids for s in mine]  # type: ignore[attr-defined]
            for stream in mine:
                open_ones = stream.uids[1:] if stream is streams[3] else stream.uids
                assert await server.get(inbox) == Abort(open_ones)
            assert not inbox.ready()
        assert await server.dispatcher.wait_until_idle(0.0)

    with_fake_server(test)


def test_refusal_of_new_requests() -> None:
    """New requests get 503 if too many requests are open, or if the server is draining."""

    async def test(server: FakeServer) -> None:
        dispatcher = server.dispatcher
        dispatcher.submit([PROMPT], SamplingParams(n=3), max_tokens_from_context=False)
        with pytest.raises(ApiError, match="Too many requests are open") as error:
            dispatcher.submit([PROMPT, PROMPT], SamplingParams(), max_tokens_from_context=False)
        assert (error.value.status, error.value.code) == (503, "overloaded")
        dispatcher.submit([PROMPT], SamplingParams(), max_tokens_from_context=False)
        dispatcher.state, dispatcher.reason = "draining", "Shutting down."
        with pytest.raises(ApiError, match="Shutting down") as error:
            dispatcher.submit([PROMPT], SamplingParams(), max_tokens_from_context=False)
        assert error.value.status == 503

    with_fake_server(test, max_open=4)


def test_queries_get_their_own_replies() -> None:
    async def test(server: FakeServer) -> None:
        one, other = (asyncio.create_task(ask_stats(server.dispatcher)) for _ in range(2))
        first, second = await server.get(server.scheduler), await server.get(server.scheduler)
        assert isinstance(first, Call)
        assert isinstance(second, Call)
        server.api.send(answer(second.arguments[0], [{"x": 2.0}, ""]))
        server.api.send(answer(first.arguments[0], [{"x": 1.0}, ""]))
        server.api.send(answer(first.arguments[0], [{"x": 9.0}, ""]))
        assert [(await task).values["x"] for task in (one, other)] == [1.0, 2.0]

    with_fake_server(test)


def test_stop_reaches_all_workers() -> None:
    async def test(server: FakeServer) -> None:
        server.dispatcher.stop()
        assert await server.get(server.scheduler) == Stop()
        for inbox in server.tokenizers:
            assert [await server.get(inbox) for _ in range(2)] == [Limits(41, 320), Stop()]

    with_fake_server(test)


def test_many_replies_do_not_starve_the_event_loop() -> None:
    async def test(server: FakeServer) -> None:
        stream = server.dispatcher.submit([PROMPT], SamplingParams(), max_tokens_from_context=False)
        for _ in range(5000):
            server.reply(Delta(stream.uids[0], "x"))
        server.reply(end(stream.uids[0]))
        events = await everything(stream)
        assert len(events) == 5001

    with_fake_server(test)


@pytest.mark.parametrize(
    ("length", "max_tokens", "field"),
    [(0, 1, "prompt"), (41, 1, "prompt"), (40, 2, "max_tokens"), (500_000, 1, "prompt")],
)
def test_promise_2_prompt_of_too_many_ids_is_not_sent(length: int, max_tokens: int, field: str) -> None:
    """A prompt that the engine can't hold is refused before it, or one beside it, is sent to a tokenizer."""

    async def test(server: FakeServer) -> None:
        prompts = [TokensPrompt(bytes(4 * 40)), TokensPrompt(bytes(4 * length))]
        with pytest.raises(ApiError) as error:
            server.dispatcher.submit(prompts, SamplingParams(n=2, max_tokens=max_tokens), max_tokens_from_context=False)
        assert (error.value.status, error.value.param) == (400, field)
        with pytest.raises(InvalidRequestError) as refused:
            check_request(SPEC, 1, [0] * length, SamplingParams(max_tokens=max_tokens))
        assert (refused.value.message, refused.value.code) == (error.value.message, error.value.code)
        assert server.dispatcher.num_open == 0
        await asyncio.to_thread(server.tokenizers[0].receive)  # the limits
        assert not server.tokenizers[0].wait(0.05)

    with_fake_server(test, tokenizers=1)
