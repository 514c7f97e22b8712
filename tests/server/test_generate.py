"""Streamed responses, with a client that reads slowly, disconnects, or asks for several choices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from minisgl.core import Finished
from minisgl.message import Delta
from minisgl.plugins.http.apis.completion import CompletionBuilder
from minisgl.plugins.http.apis.full_answer import FullBuilder, FullChoice
from minisgl.plugins.http.apis.logprobs import PromptLogprob, TokenLogprob
from minisgl.server.generate import EventStream
from minisgl.server.request_record import Stream
from minisgl.testing.serving import patient_timeout


class FakeDispatcher:
    """A stand-in for the dispatcher that records which streams were aborted."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []

    def abort(self, stream: Stream) -> None:
        self.streams.append(stream)


class Client:
    """A simulated client behind an ASGI server. It receives each part of the body after ``delay`` seconds.

    The client disconnects when the event ``disconnected`` is set.
    """

    def __init__(self, delay: float = 0.0):
        self.delay, self.body, self.started = delay, b"", False
        self.disconnected = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await asyncio.sleep(self.delay)
        self.started = True
        self.body += message.get("body", b"")

    def events(self) -> list[Any]:
        parts = [part.removeprefix("data: ") for part in self.body.decode().split("\n\n") if part]
        return [part if part == "[DONE]" else json.loads(part) for part in parts]


async def settled() -> None:
    """Let the event loop turn until the other tasks wait. Turns are counted, because time also passes without them."""
    for _ in range(50):
        await asyncio.sleep(0)


def play(
    client_delay: float,
    feed: Callable[[Stream, Client], Any],
    n: int = 1,
    make: type[FullBuilder] = FullBuilder,
) -> tuple[Client, FakeDispatcher, Stream]:
    async def run() -> tuple[Client, FakeDispatcher, Stream]:
        stream, dispatcher, client = Stream(list(range(n)), 0), FakeDispatcher(), Client(client_delay)
        builder = make(model="m", n=n, include_usage=True)
        response = EventStream(dispatcher, stream, builder)  # type: ignore[arg-type]
        async with asyncio.timeout(patient_timeout(10)):
            await asyncio.gather(response({"type": "http"}, client.receive, client.send), feed(stream, client))
        return client, dispatcher, stream

    return asyncio.run(run())


def text_of(events: list[Any], index: int = 0) -> str:
    choices = [choice for event in events if event != "[DONE]" for choice in event["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices if choice["index"] == index)


def test_promise_1_slow_client_gets_all_output() -> None:
    async def feed(stream: Stream, client: Client) -> None:
        for i in range(10):
            stream.put(0, Delta(0, f"{i} "))
            await asyncio.sleep(0)
        stream.put(0, Delta(0, "end", finish=Finished(0, "stop", 3, 0, 10)))

    client, _, stream = play(0.03, feed)
    events = client.events()
    assert text_of(events) == "0 1 2 3 4 5 6 7 8 9 end"
    assert events[-1] == "[DONE]"
    assert events[-2]["usage"]["completion_tokens"] == 10
    assert events[-3]["choices"][0]["finish_reason"] == "stop"
    assert stream.done
    assert len(events) < 10  # deltas that arrive while the client is busy share one event


def test_tokens_without_text_do_not_look_like_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk with an empty text is sent when tokens have had no text for longer than MAX_SILENCE, and not before."""
    now = 100.0
    monkeypatch.setattr(
        "minisgl.plugins.http.apis.full_answer.time", SimpleNamespace(monotonic=lambda: now, time=lambda: 0.0)
    )

    async def feed(stream: Stream, client: Client) -> None:
        nonlocal now
        await settled()
        for text, seconds in (("a", 0.0), ("", 0.04), ("", 0.02), ("", 0.04), ("b", 0.0), ("", 0.04), ("", 0.02)):
            now += seconds
            stream.put(0, Delta(0, text, tokens=[7]))
            await settled()
        stream.put(0, Delta(0, finish=Finished(0, "stop", 3, 0, 8)))

    client, _, _ = play(0.0, feed)
    events = client.events()
    assert [event["choices"][0]["delta"].get("content") for event in events[:-2]] == ["", "a", "", "b", "", None]


def test_choices_finish_separately() -> None:
    async def feed(stream: Stream, client: Client) -> None:
        stream.put(1, Delta(1, "b", finish=Finished(1, "length", 3, 0, 1)))
        await settled()
        stream.put(0, Delta(0, "a"))
        stream.put(0, Delta(0, "", finish=Finished(0, "stop", 3, 2, 2)))

    events = play(0.0, feed, n=2)[0].events()
    assert (text_of(events, 0), text_of(events, 1)) == ("a", "b")
    ends = [(c["index"], c["finish_reason"]) for e in events[:-1] for c in e["choices"] if c["finish_reason"]]
    assert ends == [(1, "length"), (0, "stop")]
    usage = events[-2]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 3)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


def test_several_tokens_in_one_delta() -> None:
    """Each token of a delta keeps its log-probability and its id, and the usage counts them all."""

    def run(i: int, tokens: list[int], finish: Finished | None = None) -> Delta:
        entries = [TokenLogprob(chr(token), b"", -float(token)) for token in tokens]
        return Delta(i, "".join(map(chr, tokens)), tokens, entries, finish)

    choices = [FullChoice(0), FullChoice(1)]
    for i, tokens in ((0, [97, 98, 99]), (1, [120]), (0, [100, 101])):
        choices[i].add(run(i, tokens))
    for i, counted in ((0, 5), (1, 1)):
        choices[i].add(Delta(i, finish=Finished(i, "length", 3, 0, counted)))
    builder = CompletionBuilder(model="m", n=2, logprobs=True, token_ids=True, include_usage=True)
    body = builder.full(choices)
    assert [choice["text"] for choice in body["choices"]] == ["abcde", "x"]
    assert [choice["token_ids"] for choice in body["choices"]] == [[97, 98, 99, 100, 101], [120]]
    assert body["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [-97, -98, -99, -100, -101]
    assert body["usage"]["completion_tokens"] == 6


def test_prompt_logprobs_in_the_response() -> None:
    """A plain completion has them in every choice of a prompt, a chat in the response."""
    positions = [None, [PromptLogprob(5, "x", float("-inf"), None), PromptLogprob(6, "y", -0.5, 1)]]
    want = [
        None,
        {
            "5": {"logprob": -9999.0, "rank": None, "decoded_token": "x"},
            "6": {"logprob": -0.5, "rank": 1, "decoded_token": "y"},
        },
    ]
    choices = [FullChoice(i) for i in range(4)]  # two prompts with two choices each
    choices[0].add(Delta(0, prompt_logprobs=positions[:1]))
    choices[0].add(Delta(0, prompt_logprobs=positions[1:]))
    choices[2].add(Delta(2, prompt_logprobs=[None]))

    def respond(chat: bool, given: list[FullChoice], asked: bool = True) -> Any:
        make = FullBuilder if chat else CompletionBuilder
        builder = make(model="m", n=2, logprobs=False, token_ids=False, include_usage=False, prompt_logprobs=asked)
        return builder.full(given)

    body = respond(False, choices)
    assert [choice["prompt_logprobs"] for choice in body["choices"]] == [want, want, [None], [None]]
    body = respond(True, choices[:2])
    assert body["prompt_logprobs"] == want
    assert "prompt_logprobs" not in body["choices"][0]
    assert "prompt_logprobs" not in respond(True, choices[:2], asked=False)


def test_error_ends_the_stream() -> None:
    """If a request fails after its first chunk, the error object is the last event of the stream."""

    async def feed(stream: Stream, client: Client) -> None:
        stream.put(0, Delta(0, "a"))
        await settled()
        stream.put(0, Delta(0, finish=Finished(0, "error", error="the engine died")))

    client, dispatcher, stream = play(0.0, feed)
    events = client.events()
    assert text_of(events[:-1]) == "a"
    assert events[-1]["error"]["message"] == "the engine died"
    assert dispatcher.streams == [stream]


def test_disconnect_without_output() -> None:
    """A disconnect is noticed while the request has no new output."""

    async def feed(stream: Stream, client: Client) -> None:
        stream.put(0, Delta(0, "a"))
        await settled()
        client.disconnected.set()

    client, dispatcher, stream = play(0.0, feed)
    assert dispatcher.streams == [stream]
    assert "[DONE]" not in client.events()


def test_disconnect_while_sending() -> None:
    """A disconnect is noticed while the response waits for a client that does not read."""

    async def feed(stream: Stream, client: Client) -> None:
        stream.put(0, Delta(0, "a"))
        await settled()
        client.disconnected.set()

    assert len(play(60.0, feed)[1].streams) == 1
