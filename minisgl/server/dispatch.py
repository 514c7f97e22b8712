"""The API server's link to the processes behind it: requests out, replies in, each reply to the one who waits for it.

It alone knows which requests are open, so it is here that each of them gets exactly one final reply, whatever happened
(promise 1). Lives in the event loop's thread. Knows nothing of HTTP but the status of an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import zmq

from minisgl.core import EngineSpec, Finished, SamplingParams
from minisgl.message import (
    Abort,
    Accepted,
    Addresses,
    Count,
    Delta,
    DetokenizeRequest,
    GetStats,
    Limits,
    Message,
    Prompt,
    Pull,
    Push,
    Replies,
    Stats,
    Stop,
    Submit,
    TextReply,
    TokensReply,
)
from minisgl.server.errors import ApiError

R = TypeVar("R", bound=Message)
State = Literal["starting", "ready", "draining", "dead"]
_BATCH = 64
"""Messages taken in before the event loop gets a turn."""


class Stream:
    """What the requests of one HTTP request gain. ``index`` of an event is the request's place among them."""

    def __init__(self, uids: Sequence[int], worker: int):
        self.uids, self.worker = uids, worker
        self._open = len(uids)  # requests without their final reply
        self._events: list[tuple[int, Delta]] = []
        self._accepted = 0
        self._wake = asyncio.Event()

    def put(self, index: int, delta: Delta) -> None:
        if delta.finish is not None:
            self._open -= 1
        self._events.append((index, delta))
        self._wake.set()

    def accept(self) -> None:
        self._accepted += 1
        self._wake.set()

    async def accepted(self) -> None:
        """Wait until every request has passed the checks, or one has not, or there is news anyway."""
        while self._accepted < len(self.uids) and not self._events:
            await self._next()

    @property
    def done(self) -> bool:
        """Whether `get` has returned every final reply."""
        return self._open == 0 and not self._events

    def peek(self) -> list[Delta]:
        """The news so far, which `get` returns too."""
        return [delta for _, delta in self._events]

    async def get(self) -> list[tuple[int, Delta]]:
        """Wait for news: all that came since the last call, in order."""
        while not self._events:
            await self._next()
        events, self._events = self._events, []
        return events

    async def _next(self) -> None:
        self._wake.clear()
        await self._wake.wait()


class Dispatcher:
    """Sends to the tokenizers, receives from all. ``state`` says what new requests are told."""

    def __init__(self, addresses: Addresses, max_open: int):
        self._context = zmq.Context()
        self._inbox = Pull(self._context, addresses.api)
        self._tokenizers = [Push(self._context, address) for address in addresses.tokenizers]
        self._scheduler = Push(self._context, addresses.scheduler)
        self._detokenizer = Push(self._context, addresses.detokenizer)
        self._uids = itertools.count(1)
        self._turn = itertools.cycle(range(len(self._tokenizers)))
        self._requests: dict[int, tuple[Stream, int]] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._max_open = max_open
        self._idle = asyncio.Event()
        self._idle.set()
        self.state: State = "starting"
        self.reason = "The server is starting."
        self.spec: EngineSpec | None = None
        self._closed = False
        asyncio.get_running_loop().add_reader(self._inbox.fileno(), self._receive)

    @property
    def open(self) -> int:
        """Requests without their final reply."""
        return len(self._requests)

    @property
    def max_len(self) -> int:
        """Tokens that a request may have, prompt and output together."""
        spec = self.spec
        return 0 if spec is None else min(spec.max_seq_len, spec.num_pages * spec.page_size + 1)

    def begin(self, spec: EngineSpec) -> None:
        """Every process is ready: let requests in."""
        self.spec, self.state, self.reason = spec, "ready", ""
        for tokenizer in self._tokenizers:
            tokenizer.send(Limits(self.max_len, spec.vocab_size))

    # ---- requests ------------------------------------------------------------------------------------

    def submit(self, prompts: Sequence[Prompt], params: SamplingParams, fill: bool) -> Stream:
        """Send ``params.n`` requests for each prompt; they are numbered in this order. Raises `ApiError` (503)."""
        self.check_open(len(prompts) * params.n)
        uids = [next(self._uids) for _ in range(len(prompts) * params.n)]
        worker = next(self._turn)
        stream = Stream(uids, worker)
        self._requests.update((uid, (stream, index)) for index, uid in enumerate(uids))
        self._idle.clear()
        for i, prompt in enumerate(prompts):
            self._tokenizers[worker].send(Submit(uids[i * params.n : (i + 1) * params.n], prompt, params, fill))
        return stream

    def check_open(self, more: int = 0) -> None:
        """Raise `ApiError` (503) unless so many new requests may come in."""
        if self.state != "ready":
            raise ApiError(503, self.reason)
        if self.open + more > self._max_open:
            raise ApiError(
                503,
                f"Too many requests are open ({self.open} of {self._max_open}): try again later.",
                code="overloaded",
            )

    def abort(self, stream: Stream) -> None:
        """Nobody waits for the stream any more. It goes the way its requests went, so it never overtakes them."""
        gone = [uid for uid in stream.uids if self._requests.pop(uid, None) is not None]
        if gone:
            self._tokenizers[stream.worker].send(Abort(gone))
            self._check_idle()

    def fail(self, message: str, status: int = 500) -> None:
        """End every open request, and whatever else waits, with an error."""
        for uid in list(self._requests):
            self._deliver(Delta(uid, finish=Finished(uid, "error", error=message, status=status)))
        for future in self._questions.values():
            if not future.done():
                future.set_exception(ApiError(status, message))

    async def idle(self, timeout: float) -> bool:
        """Wait until no request is open, at most ``timeout`` seconds; whether that came."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)
        return self._idle.is_set()

    # ---- questions -------------------------------------------------------------------------------------

    async def count(self, prompt: Prompt, strings: bool) -> TokensReply:
        """Ask a tokenizer for a prompt's token ids."""
        to = self._tokenizers[next(self._turn)]
        return await self._ask(to, lambda uid: Count(uid, prompt, strings), TokensReply)

    async def untokenize(self, ids: bytes) -> TextReply:
        """Ask a tokenizer for the text of token ids."""
        return await self._ask(self._tokenizers[next(self._turn)], lambda uid: DetokenizeRequest(uid, ids), TextReply)

    async def stats(self) -> Stats:
        """Ask the scheduler for its counts, as they are between two of its steps."""
        return await self._ask(self._scheduler, GetStats, Stats)

    async def _ask(self, to: Push, question: Callable[[int], Message], kind: type[R]) -> R:
        if self.state not in ("ready", "draining"):
            raise ApiError(503, self.reason)
        uid = next(self._uids)
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._questions[uid] = future
        try:
            to.send(question(uid))
            return await future
        finally:
            del self._questions[uid]

    # ---- replies ---------------------------------------------------------------------------------------

    def _receive(self) -> None:
        for _ in range(_BATCH):
            if self._closed or not self._inbox.ready():
                return
            self._take(self._inbox.receive())
        asyncio.get_running_loop().call_soon(self._receive)  # the descriptor only tells of what comes from now on

    def _take(self, message: Message) -> None:
        match message:
            case Replies(deltas=deltas):
                for delta in deltas:
                    self._deliver(delta)
            case Accepted(uids=uids):
                for uid in uids:
                    if uid in self._requests:
                        self._requests[uid][0].accept()
            case TokensReply(uid=uid) | TextReply(uid=uid) | Stats(uid=uid):
                future = self._questions.get(uid)
                if future is not None and not future.done():
                    future.set_result(message)
            case _:
                raise TypeError(f"the API server got a {type(message).__name__}")

    def _deliver(self, delta: Delta) -> None:
        request = self._requests.get(delta.uid)
        if request is None:  # it was aborted, or has had its final reply
            return
        stream, index = request
        if delta.finish is not None:
            del self._requests[delta.uid]
            self._check_idle()
        stream.put(index, delta)

    def _check_idle(self) -> None:
        if not self._requests:
            self._idle.set()

    # ---- the end ---------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask every process to end."""
        for worker in (self._scheduler, self._detokenizer, *self._tokenizers):
            worker.send(Stop())

    def close(self) -> None:
        """Close the sockets."""
        self._closed = True
        asyncio.get_running_loop().remove_reader(self._inbox.fileno())
        self._context.destroy(linger=0)
