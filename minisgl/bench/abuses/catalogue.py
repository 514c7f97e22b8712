"""The abuses: each is a function that abuses a server until its work is done, or the target's deadline has come.

An abuse returns how often the server gave which answer: an HTTP status, "no answer" for a connection that was closed
without one, or "still open".
"""

from __future__ import annotations

import asyncio
import json
import random
import string
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from minisgl.bench.abuses.sending import UNANSWERED, Target, completion, hold, post, repeat

TIMES = 100
"""Number of requests of the abuses that send whole requests."""


class Abuse(NamedTuple):
    """An abuse: what it does in a few words, and the function that does it."""

    summary: str
    run: Callable[[Target], Coroutine[None, None, Counter[str]]]


ABUSES: dict[str, Abuse] = {}


def _abuse(name: str, summary: str) -> Callable[[Callable[[Target], Coroutine[None, None, Counter[str]]]], None]:
    def add(run: Callable[[Target], Coroutine[None, None, Counter[str]]]) -> None:
        ABUSES[name] = Abuse(summary, run)

    return add


# ---- values ---------------------------------------------------------------------------------------------------


@_abuse("integers", "n=128 and integers of more than 64 bits, in each field that takes integers")
async def _integers(target: Target) -> Counter[str]:
    big = 2**64 - 1
    values = {"max_tokens": big, "top_k": big, "seed": big, "stop_token_ids": [big], "logit_bias": {big: 1}}
    requests = [completion(prompt="x", n=128, **{field: value}) for field, value in values.items()]
    return await repeat(target, requests * (TIMES // len(requests)), 8)


@_abuse("nesting", "lists nested 20,000 times, in each field that takes any JSON value")
async def _nesting(target: Target) -> Counter[str]:
    deep = b"[" * 20_000 + b"]" * 20_000
    message = b'{"role":"assistant","content":"x","tool_calls":' + deep + b"}"
    bodies = [
        b'{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"a":' + deep + b"}}",
        b'{"messages":[' + message + b"]}",
        b'{"messages":' + deep + b"}",
    ]
    return await repeat(target, [post("/v1/chat/completions", bodies[i % 3]) for i in range(TIMES)], 8)


@_abuse("stop strings", "16 stop strings that fill the largest body, with n=128")
async def _stop_strings(target: Target) -> Counter[str]:
    stops = ["a" * (target.largest_body // 17 - i) for i in range(16)]
    return await repeat(target, [completion(prompt="x", n=128, max_tokens=64, stop=stops)] * TIMES, 8)


@_abuse("allowed stop strings", "16 stop strings of 1,024 characters, with n=128")
async def _allowed_stop_strings(target: Target) -> Counter[str]:
    stops = ["a" * 1023 + chr(98 + i) for i in range(16)]
    return await repeat(target, [completion(prompt="a", n=128, max_tokens=16, stop=stops)] * 20, 2)


@_abuse("stop token ids", "a list of token ids that fills the largest body")
async def _stop_token_ids(target: Target) -> Counter[str]:
    ids = [1] * (target.largest_body // 3 - 100)
    return await repeat(target, [completion(prompt="x", stop_token_ids=ids)] * TIMES, 4)


@_abuse("lists as prompts", "empty lists, objects and strings as prompts that fill the largest body")
async def _prompt_lists(target: Target) -> Counter[str]:
    items = ["[]", '""', "{}", "[1]"]
    size = target.largest_body - 100
    bodies = [f'{{"prompt":[{",".join([item] * (size // (len(item) + 1)))}]}}'.encode() for item in items]
    return await repeat(target, [post("/v1/completions", bodies[i % 4]) for i in range(TIMES)], 4)


@_abuse("long texts", "prompts of one text that fills the largest body, to complete and to tokenize")
async def _long_texts(target: Target) -> Counter[str]:
    letters = random.Random(0).choices(string.ascii_letters + string.digits + " ", k=target.largest_body - 100)
    text = "".join(letters)
    requests = [completion(prompt=text), post("/tokenize", {"prompt": text})]
    return await repeat(target, [requests[i % 2] for i in range(TIMES)], 4)


@_abuse("bodies above the limit", "bodies of 64 MiB, with their length in the headers and in chunks")
async def _large_bodies(target: Target) -> Counter[str]:
    size = 2**26
    chunk = b"10000\r\n" + b" " * 2**16 + b"\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    whole = head + b"content-length: %d\r\n\r\n" % size + b" " * size
    chunked = head + b"transfer-encoding: chunked\r\n\r\n" + chunk * (size // 2**16)
    return await repeat(target, [whole, chunked] * 10, 4)


@_abuse("many turns", "chats of empty messages, and of messages with a mark, that fill the largest body")
async def _many_turns(target: Target) -> Counter[str]:
    chats = [_chat_of_turns(target, content) for content in ("", "<")]
    return await repeat(target, [chats[i % 2] for i in range(TIMES)], 4)


@_abuse("chats within the bounds", "chats with as many messages of a mark as a request may have tokens")
async def _allowed_turns(target: Target) -> Counter[str]:
    messages = [{"role": "user", "content": "<"}] * target.max_model_len
    return await repeat(target, [post("/v1/chat/completions", {"messages": messages})] * TIMES, 4)


@_abuse("ids to detokenize", "as many token ids to detokenize as the largest body has")
async def _ids_to_detokenize(target: Target) -> Counter[str]:
    ids = [9] * (target.largest_body // 3 - 100)
    return await repeat(target, [post("/detokenize", {"tokens": ids})] * TIMES, 4)


@_abuse("pages of other sites", "requests with the headers of web pages of other sites, or with other bodies than JSON")
async def _pages(target: Target) -> Counter[str]:
    request = completion(prompt="x", max_tokens=64)
    changes = [
        (b"host: x", b"host: evil.example"),
        (b"host: x", b"host: x\r\norigin: https://evil.example"),
        (b"application/json", b"text/plain"),
        (b"host: x", b"host: x\r\ncontent-encoding: gzip"),
    ]
    return await repeat(target, [request.replace(*changes[i % 4], 1) for i in range(TIMES)], 4)


# ---- the queue --------------------------------------------------------------------------------------------------


@_abuse("queue filled by prompts", "requests for 1,000 choices of long streams, each with a prompt of its own")
async def _queue_of_prompts(target: Target) -> Counter[str]:
    request = _long_streams(target, prompt=[[5]] * 1000)
    return await hold(target, 8, lambda i: target.send_and_stay(request))


@_abuse("queue filled by n", "40 requests for 128 choices of long streams, each with one prompt")
async def _queue_of_choices(target: Target) -> Counter[str]:
    request = _long_streams(target, prompt=[5], n=128)
    return await hold(target, 40, lambda i: target.send_and_stay(request))


@_abuse("too many choices", "requests for 4,096 choices and more, by prompts and by n")
async def _too_many_choices(target: Target) -> Counter[str]:
    requests = [_long_streams(target, prompt=[[5]] * 4096), _long_streams(target, prompt=[[5]] * 32, n=128)]
    return await repeat(target, [requests[i % 2] for i in range(TIMES)], 4)


def _long_streams(target: Target, **fields: Any) -> bytes:
    more = {"max_tokens": target.max_model_len * 3 // 4, "ignore_eos": True, "stream": True, "temperature": 1}
    return completion(**fields, **more)


def _chat_of_turns(target: Target, content: str) -> bytes:
    message = json.dumps({"role": "user", "content": content}, separators=(",", ":"))
    count = (target.largest_body - 100) // (len(message) + 1)
    return post("/v1/chat/completions", f'{{"messages":[{",".join([message] * count)}]}}'.encode())


# ---- connections -------------------------------------------------------------------------------------------------


@_abuse("silent connections", "2,000 connections that send nothing")
async def _silent(target: Target) -> Counter[str]:
    return await hold(target, 2000, lambda i: target.send(b""))


@_abuse("slow requests", "200 connections that send a byte of the headers, and 200 a byte of the body, each second")
async def _slow(target: Target) -> Counter[str]:
    async def act(i: int) -> str:
        reader, writer = await target.connect()
        try:
            writer.write(b"GET /" if i % 2 else post("/v1/completions", b" " * 1000)[:-1000])
            while not reader.at_eof():
                writer.write(b"x")
                try:
                    line = await asyncio.wait_for(reader.readline(), 1.0)
                except TimeoutError:
                    continue
                return line.split()[1].decode() if line else UNANSWERED
            return UNANSWERED
        finally:
            writer.transport.abort()

    return await hold(target, 400, act)


@_abuse(
    "half bodies", "10,000 connections, more than there may be, that send the headers of a request and one byte more"
)
async def _half_bodies(target: Target) -> Counter[str]:
    request = post("/v1/completions", b"{" + b" " * 99)[:-99]

    async def act(i: int) -> str:
        await asyncio.sleep(i / 2000)  # else the kernel drops connections, and other clients wait a second for theirs
        return await target.send(request)

    return await hold(target, 10_000, act)


@_abuse(
    "unread streams",
    "16 clients that ask for 4 streams with 20 log-probabilities a token, and read nothing",
)
async def _unread(target: Target) -> Counter[str]:
    more = {"n": 4, "max_tokens": 512, "ignore_eos": True, "logprobs": 20, "temperature": 1}
    request = completion(prompt=[1, 2], stream=True, **more)

    async def act(i: int) -> str:
        _, writer = await target.connect(receive_buffer=4096)
        try:
            writer.write(request)
            await asyncio.sleep(target.seconds_left + 1)
            return "still open"
        finally:
            writer.transport.abort()

    return await hold(target, 16, act)


@_abuse("5,000 requests", "5,000 requests for eight tokens at once, each on a connection of its own")
async def _burst(target: Target) -> Counter[str]:
    request = completion(prompt="The tutor says", max_tokens=8, ignore_eos=True)
    return await hold(target, 5000, lambda i: target.send(request))


@_abuse("abandoned streams", "300 clients that ask for 4 long streams each and leave after the first event")
async def _abandoned(target: Target) -> Counter[str]:
    request = completion(prompt=[1, 2], n=4, max_tokens=target.max_model_len // 2, ignore_eos=True, stream=True)
    return await repeat(target, [request] * 300, 16)


@_abuse("no HTTP", "2,000 connections that send 1 KiB of random bytes")
async def _junk(target: Target) -> Counter[str]:
    source = random.Random(0)
    return await repeat(target, (source.randbytes(1024) for _ in range(2000)), 32)


@_abuse("large headers", "200 requests with 1 MiB of headers")
async def _headers(target: Target) -> Counter[str]:
    requests = [b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 170_000, b"GET /" + b"x" * 2**20]
    return await repeat(target, requests * 100, 8)


@_abuse("pipelined requests", "100 connections that send 10,000 requests each at once")
async def _pipelined(target: Target) -> Counter[str]:
    return await repeat(target, [b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 10_000] * 100, 8)


# ---- the server's own sockets -------------------------------------------------------------------------------------


@_abuse(
    "sockets of the processes", "10,000 messages of random bytes to each process of the server (only to its own user)"
)
async def _sockets(target: Target) -> Counter[str]:
    source, seen = random.Random(0), Counter[str]()
    context = zmq.Context()
    for path in sorted(Path(target.folder or "/nowhere").rglob("*")):
        if path.is_socket():
            push = context.socket(zmq.PUSH)
            push.connect(f"ipc://{path}")
            for _ in range(10_000):
                push.send(source.randbytes(64))
            push.close(linger=5000)
            seen["sent"] += 10_000
    await asyncio.to_thread(context.term)
    return seen
