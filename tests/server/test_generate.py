"""One streamed answer, against a client that reads slowly, hangs up, or asks for more than one choice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from minisgl.core import Finished
from minisgl.message import Delta
from minisgl.server.answers import Answer
from minisgl.server.dispatch import Stream
from minisgl.server.generate import EventStream


class Aborts:
    """In the dispatcher's place: notes which streams were given up."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []

    def abort(self, stream: Stream) -> None:
        self.streams.append(stream)


class Client:
    """An ASGI server's side: takes what is sent, each piece after ``delay`` seconds."""

    def __init__(self, delay: float = 0.0):
        self.delay, self.body, self.started = delay, b"", False
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await asyncio.sleep(self.delay)
        self.started = True
        self.body += message.get("body", b"")

    def events(self) -> list[Any]:
        parts = [part.removeprefix("data: ") for part in self.body.decode().split("\n\n") if part]
        return [part if part == "[DONE]" else json.loads(part) for part in parts]


def play(client_delay: float, feed: Callable[[Stream, Client], Any], n: int = 1) -> tuple[Client, Aborts, Stream]:
    async def run() -> tuple[Client, Aborts, Stream]:
        stream, aborts, client = Stream(list(range(n)), 0), Aborts(), Client(client_delay)
        answer = Answer(chat=True, model="m", n=n, logprobs=False, token_ids=False, include_usage=True)
        response = EventStream(aborts, stream, answer)  # type: ignore[arg-type]
        async with asyncio.timeout(10):
            await asyncio.gather(response({"type": "http"}, client.receive, client.send), feed(stream, client))
        return client, aborts, stream

    return asyncio.run(run())


def text_of(events: list[Any], index: int = 0) -> str:
    choices = [choice for event in events if event != "[DONE]" for choice in event["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices if choice["index"] == index)


def test_promise_1_a_slow_reader_gets_everything() -> None:
    async def feed(stream: Stream, client: Client) -> None:
        for i in range(10):
            stream.put(0, Delta(0, f"{i} "))
            await asyncio.sleep(0.001)
        stream.put(0, Delta(0, "end", finish=Finished(0, "stop", 3, 0, 10)))

    client, _, stream = play(0.03, feed)
    events = client.events()
    assert text_of(events) == "0 1 2 3 4 5 6 7 8 9 end"
    assert events[-1] == "[DONE]"
    assert events[-2]["usage"]["completion_tokens"] == 10
    assert events[-3]["choices"][0]["finish_reason"] == "stop"
    assert stream.done
    assert len(events) < 10  # what came meanwhile came together


def test_choices_end_one_by_one() -> None:
    async def feed(stream: Stream, client: Client) -> None:
        stream.put(1, Delta(1, "b", finish=Finished(1, "length", 3, 0, 1)))
        await asyncio.sleep(0.01)
        stream.put(0, Delta(0, "a"))
        stream.put(0, Delta(0, "", finish=Finished(0, "stop", 3, 2, 2)))

    events = play(0.0, feed, n=2)[0].events()
    assert (text_of(events, 0), text_of(events, 1)) == ("a", "b")
    ends = [(c["index"], c["finish_reason"]) for e in events[:-1] for c in e["choices"] if c["finish_reason"]]
    assert ends == [(1, "length"), (0, "stop")]
    usage = events[-2]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 3)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


def test_an_error_in_the_middle_is_the_last_event() -> None:
    async def feed(stream: Stream, client: Client) -> None:
        stream.put(0, Delta(0, "a"))
        await asyncio.sleep(0.01)
        stream.put(0, Delta(0, finish=Finished(0, "error", error="the engine died")))

    client, aborts, stream = play(0.0, feed)
    events = client.events()
    assert text_of(events[:-1]) == "a"
    assert events[-1]["error"]["message"] == "the engine died"
    assert aborts.streams == [stream]


def test_a_client_that_hangs_up_is_noticed_while_nothing_comes() -> None:
    async def feed(stream: Stream, client: Client) -> None:
        stream.put(0, Delta(0, "a"))
        await asyncio.sleep(0.02)
        client.gone.set()

    client, aborts, stream = play(0.0, feed)
    assert aborts.streams == [stream]
    assert "[DONE]" not in client.events()


def test_a_client_that_hangs_up_is_noticed_while_it_does_not_read() -> None:
    async def feed(stream: Stream, client: Client) -> None:
        stream.put(0, Delta(0, "a"))
        await asyncio.sleep(0.05)
        client.gone.set()

    assert len(play(60.0, feed)[1].streams) == 1
