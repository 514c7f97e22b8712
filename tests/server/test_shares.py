"""Shares of the queue: one HTTP request or one client does not keep others out, and its prompts do not delay theirs."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from minisgl.core import SamplingParams
from minisgl.message import Abort, Call, Message, Submit, TextPrompt
from minisgl.plugins.http.apis.fair_inbox import FairInbox
from minisgl.plugins.http.bounds import default_choices
from minisgl.plugins.http.shares import DISPLACED, Shares
from minisgl.server.errors import ApiError
from minisgl.server.request_record import Stream
from minisgl.testing.serving import Server

from .test_dispatch import FakeServer, everything, with_fake_server
from .test_errors import PLAIN, assert_serves, error_of

pytestmark = pytest.mark.xdist_group("tutor")  # one process: the server starts once

PROMPT = TextPrompt("x")


def submit(server: FakeServer, client: str, prompts: int = 1, n: int = 1) -> Stream:
    return server.dispatcher.submit([PROMPT] * prompts, SamplingParams(n=n), False, client=client)


# ---- admission ---------------------------------------------------------------------------------------------------


def test_default_of_max_choices() -> None:
    assert [default_choices(most) for most in (4, 128, 400, 4096, 16384)] == [4, 128, 128, 1024, 4096]


@pytest.mark.parametrize(("prompts", "n", "param"), [(101, 1, "prompt"), (1, 101, "n"), (26, 4, "prompt")])
def test_promise_2_too_many_choices_are_refused(run_app: Callable[..., None], prompts: int, n: int, param: str) -> None:
    """A request of more choices than ``server.max_choices`` gets 400, and nothing is sent to another process."""

    async def test(server: Any) -> None:
        async with server.client() as client:
            body = {"prompt": [[5]] * prompts, "n": n}
            error = error_of(await client.post(PLAIN, json=body), 400)
        assert "server.max_choices" in error["message"]
        assert error["param"] == param
        assert server.dispatcher.num_open == 0
        assert server.submitted == []

    run_app(test, max_queued=100)


def test_promise_1_one_client_does_not_fill_the_queue() -> None:
    """A new client finds room where another one has more: its youngest requests end with 503, each exactly once."""

    async def test(server: FakeServer) -> None:
        Shares(100).attach(server.dispatcher)
        many = [submit(server, "a") for _ in range(100)]
        with pytest.raises(ApiError, match="Too many requests are open"):
            submit(server, "a")
        submit(server, "b", prompts=3)
        assert server.dispatcher.num_open == 100
        ended = [stream for stream in many if stream.peek()]
        assert ended == many[-3:]
        for stream in ended:
            ends = [delta.finish for _, delta in await everything(stream)]
            assert [(end.status, end.error) for end in ends if end] == [(503, DISPLACED)]

    with_fake_server(test)


def test_clients_share_the_queue_equally() -> None:
    async def test(server: FakeServer) -> None:
        Shares(100).attach(server.dispatcher)
        for _ in range(100):
            submit(server, "a")
        for _ in range(49):
            submit(server, "b")
        for client in ("a", "b"):
            with pytest.raises(ApiError, match="Too many requests are open"):
                submit(server, client)

    with_fake_server(test)


@pytest.mark.parametrize(
    ("sizes", "displaces"), [([100], True), ([25] * 4, True), ([50, 49, 1], True), ([2] * 50, False)]
)
def test_large_requests_do_not_fill_the_queue(sizes: list[int], displaces: bool) -> None:
    """The largest request of the same client makes room for a smaller one, if it has more than a share."""

    async def test(server: FakeServer) -> None:
        Shares(100).attach(server.dispatcher)
        streams = [submit(server, "a", n=size) for size in sizes]
        if not displaces:
            with pytest.raises(ApiError, match="Too many requests are open"):
                submit(server, "a")
            return
        submit(server, "a")
        ended = [stream for stream in streams if stream.peek()]
        assert [len(stream.uids) for stream in ended] == [max(sizes)]

    with_fake_server(test, max_open=100)


# ---- the tokenizer's inbox -----------------------------------------------------------------------------------------


class Arrived:
    """The tokenizer's socket, at which these messages have arrived."""

    def __init__(self, messages: list[Message]):
        self._messages = messages

    def drain(self, block: bool) -> Iterator[Message]:
        while self._messages:
            yield self._messages.pop(0)


def received(sent: list[Message]) -> list[Any]:
    """Return the messages in the order in which a `FairInbox` returns them."""
    inbox = FairInbox(Arrived(sent[1:]), sent[0])  # type: ignore[arg-type]
    messages = [inbox.receive()]
    while inbox._queues:
        messages.append(inbox.receive())
    return messages


def of(uid: int, group: int = 0) -> Submit:
    return Submit([uid], PROMPT, SamplingParams(), group=group)


def test_prompts_of_one_request_do_not_delay_others() -> None:
    messages = received([*(of(uid, 1) for uid in range(1, 6)), of(6), of(7, 7), of(8, 7), Call(""), of(9)])
    names = [message.uids[0] if isinstance(message, Submit) else "query" for message in messages]
    assert names == [1, 6, 7, 2, "query", 8, 3, 9, 4, 5]


def test_promise_1_abort_does_not_overtake_prompts() -> None:
    """Prompts of aborted requests that still wait are dropped; the `Abort` of all goes on to the scheduler."""
    sent = [of(1, 1), of(2, 1), of(3, 1), of(4), Abort([1, 2, 3]), Abort([4])]
    assert received(sent) == [of(4), Abort([1, 2, 3]), Abort([4])]


# ---- a server ------------------------------------------------------------------------------------------------------


def hold(server: Server, stack: ExitStack, **fields: Any) -> None:
    """Send a request for a long stream, and read the response in the background."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    client = stack.enter_context(socket.create_connection((host, int(port))))
    body = json.dumps({"max_tokens": 1500, "ignore_eos": True, "stream": True, **fields}).encode()
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    assert client.recv(100).startswith(b"HTTP/1.1 200 ")

    def read() -> None:
        try:
            while client.recv(1 << 16):
                pass
        except OSError:
            pass

    threading.Thread(target=read, daemon=True).start()


def test_other_clients_are_served_while_one_fills_the_server(tutor: Server) -> None:
    """One connection with a thousand choices, and then four, delay a small request by some steps only."""
    with ExitStack() as stack:
        for choices in (1000, 1000, 1000, 1000, 128):
            hold(tutor, stack, prompt=[[5]] * choices)
            for _ in range(3):
                body = {"prompt": "The tutor", "max_tokens": 2, "ignore_eos": True}
                assert httpx.post(tutor.url + PLAIN, json=body, timeout=60).status_code == 200
        assert tutor.metrics()["minisgl_scheduler_num_waiting_reqs"] > 1000
        error = error_of(httpx.post(tutor.url + PLAIN, json={"prompt": [[5]] * 4096}, timeout=60), 400)
        assert error["param"] == "prompt"
    assert_serves(tutor)
