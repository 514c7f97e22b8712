"""The dispatcher: the API server's connection to the worker processes.

The dispatcher sends requests to the tokenizers, and passes each reply to the HTTP handler that waits for it. It knows
which requests are open, and makes sure that each of them gets exactly one final reply (promise 1). It runs in the event
loop's thread. Of HTTP it knows only the status of an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import zmq

from minisgl.core import EngineSpec, Finished, InvalidRequestError, SamplingParams
from minisgl.message import (
    Abort,
    Accepted,
    Call,
    Delta,
    Limits,
    Message,
    Prompt,
    Replies,
    Stop,
    Submit,
    TokensPrompt,
    num_ids,
)
from minisgl.message.link import Link
from minisgl.message.queue import Addresses, Pull, Push
from minisgl.server.errors import ApiError
from minisgl.server.request_record import Stream

State = Literal["starting", "ready", "draining", "dead"]
START_RETRY_SECONDS = 2
"""Seconds after which a client should repeat a request that came while the server starts."""
_BATCH = 64
"""The largest number of messages that are received before other tasks of the event loop run."""


class Dispatcher:
    """The open requests of a server, and the sockets to its worker processes.

    New requests are accepted only while ``state`` is "ready"; otherwise they are refused with ``reason``. ``max_open``
    is the largest number of open requests. If new requests find no room, ``make_room`` may end others; its arguments
    are the client, the number of its new requests, and the number of missing places. ``requests`` has the stream of
    each open request and its index there, by its uid, the oldest first. ``spec`` is None until the engine is ready.
    """

    def __init__(self, addresses: Addresses, max_open: int):
        self._context = zmq.Context()
        self.inbox = Pull(self._context, addresses.api)
        self._tokenizers = [Push(self._context, address) for address in addresses.tokenizers]
        self._scheduler = Push(self._context, addresses.scheduler)
        self._detokenizer = Push(self._context, addresses.detokenizer)
        self._workers = {"scheduler-0": self._scheduler, "detokenizer": self._detokenizer}  # by their names
        followers = enumerate(addresses.followers, 1)
        self._workers |= {f"scheduler-{rank}": Push(self._context, address) for rank, address in followers}
        if addresses.detokenizer not in addresses.tokenizers:
            self._workers |= {f"tokenizer-{i}": push for i, push in enumerate(self._tokenizers)}
        self._uids = itertools.count(1)
        self._next_tokenizer = itertools.cycle(range(len(self._tokenizers)))
        self.requests: dict[int, tuple[Stream, int]] = {}
        self.pending: dict[int, asyncio.Future[Any]] = {}
        """What extensions wait for besides the replies to requests, by their own numbers: `fail` ends it too."""
        self.link = Link(self._scheduler.send)
        self._max_open = max_open
        self.make_room: Callable[[str, int, int], None] = lambda client, count, missing: None
        self._idle = asyncio.Event()
        self._idle.set()
        self.state: State = "starting"
        self.reason = "The server is starting."
        self.spec: EngineSpec | None = None
        self._closed = False
        asyncio.get_running_loop().add_reader(self.inbox.fileno(), self._receive)

    @property
    def num_open(self) -> int:
        """The number of open requests: those without their final reply."""
        return len(self.requests)

    @property
    def max_seq_len(self) -> int:
        """The largest number of tokens of a request, prompt and output together. 0 until the engine is ready.

        It is limited by the model, and by the KV pool: the KV of a request's last token is never stored.
        """
        return 0 if self.spec is None else self.spec.max_tokens_per_request

    @property
    def workers(self) -> Sequence[str]:
        """The names of the worker processes that have a socket here."""
        return list(self._workers)

    def begin(self, spec: EngineSpec) -> None:
        """Accept requests from now on. The launcher calls this when every worker is ready."""
        self.spec, self.state, self.reason = spec, "ready", ""
        for tokenizer in self._tokenizers:
            tokenizer.send(Limits(self.max_seq_len, spec.vocab_size))

    # ---- requests ------------------------------------------------------------------------------------

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        max_tokens_from_context: bool,
        request_id: str = "",
        client: str = "",
    ) -> Stream:
        """Send ``params.n`` requests for each prompt to a tokenizer, and return the stream of their replies.

        The stream has the first prompt's ``n`` requests first, then the second prompt's, and so on. See `Submit` for
        ``max_tokens_from_context`` and ``request_id``. Raise `ApiError` (400), before anything is sent to another
        process, for a prompt of too many token ids. Raise `ApiError` (503) if the server accepts no new request.
        """
        self._check_state()
        assert self.spec is not None
        for prompt in prompts:
            if isinstance(prompt, TokensPrompt):
                try:
                    self.spec.check_length(num_ids(prompt.ids), params.max_tokens)
                except InvalidRequestError as error:
                    raise ApiError.from_invalid(error) from None
        uids = [next(self._uids) for _ in range(len(prompts) * params.n)]
        group = uids[0] if len(uids) > 1 else 0
        # Encode every message before a request is registered: a value that can't be encoded leaves no open request.
        messages = [
            Submit(
                uids[i * params.n : (i + 1) * params.n], prompt, params, max_tokens_from_context, request_id, group
            ).encode()
            for i, prompt in enumerate(prompts)
        ]
        missing = self.num_open + len(uids) - self._max_open
        if missing > 0:
            self.make_room(client, len(uids), missing)
        self.check_open(len(uids))
        tokenizer = next(self._next_tokenizer)
        stream = Stream(uids, tokenizer, client, params)
        self.requests.update((uid, (stream, index)) for index, uid in enumerate(uids))
        self._idle.clear()
        try:
            for message in messages:
                self._tokenizers[tokenizer].send_bytes(message)
        except BaseException:
            self.abort(stream)
            raise
        return stream

    def check_open(self, more: int = 0) -> None:
        """Raise `ApiError` (503) unless the server is ready and can accept ``more`` new requests."""
        self._check_state()
        if self.num_open + more > self._max_open:
            message = f"Too many requests are open ({self.num_open} of {self._max_open}): try again later."
            raise ApiError(503, message, code="overloaded", headers={"retry-after": "1"})

    def _check_state(self) -> None:
        if self.state != "ready":
            raise self.unavailable()

    def unavailable(self) -> ApiError:
        """Return the error (503) of a request while the server can't answer it. While it starts, it may be repeated."""
        headers = {"retry-after": str(START_RETRY_SECONDS)} if self.state == "starting" else {}
        return ApiError(503, self.reason, headers=headers)

    def abort(self, stream: Stream) -> None:
        """Abort the stream's open requests. Nothing happens if all of them have had their final reply.

        The `Abort` message goes to the tokenizer that got the requests, so it never overtakes them.
        """
        open_uids = [uid for uid in stream.uids if self.requests.pop(uid, None) is not None]
        if open_uids:
            self._check_idle()
            self._tokenizers[stream.tokenizer].send(Abort(open_uids))

    def end(self, stream: Stream, message: str, status: int, code: str = "") -> bool:
        """Abort the stream's open requests, and end each of them with an error. ``code`` is that of `ApiError`.

        Return whether there was an open request.
        """
        open_uids = [uid for uid in stream.uids if uid in self.requests]
        for uid in open_uids:
            self._deliver(Delta(uid, finish=Finished(uid, "error", error=message, status=status, code=code)))
        if open_uids:
            self._tokenizers[stream.tokenizer].send(Abort(open_uids))
        return bool(open_uids)

    def fail(self, message: str, status: int = 500) -> None:
        """End every open request, and what extensions wait for, with an error."""
        for uid in list(self.requests):
            self._deliver(Delta(uid, finish=Finished(uid, "error", error=message, status=status)))
        for future in self.pending.values():
            if not future.done():
                future.set_exception(ApiError(status, message))

    async def wait_until_idle(self, timeout: float) -> bool:
        """Wait until no request is open, for at most ``timeout`` seconds. Return whether no request is open."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)
        return self._idle.is_set()

    def send(self, worker: str, message: Message) -> None:
        """Send a message to one of `workers`."""
        self._workers[worker].send(message)

    # ---- replies ---------------------------------------------------------------------------------------

    def _receive(self) -> None:
        if self._closed:
            return
        for message in itertools.islice(self.inbox.drain(block=False), _BATCH):
            self._handle(message)
        if not self.inbox.ready():
            return
        # The edge-triggered descriptor does not report messages that have arrived already, so schedule another call.
        asyncio.get_running_loop().call_soon(self._receive)

    def _handle(self, message: Message) -> None:
        match message:
            case Replies(deltas=deltas):
                for delta in deltas:
                    self._deliver(delta)
            case Accepted(uids=uids, prompt_tokens=prompt_tokens):
                for uid, tokens in zip(uids, prompt_tokens, strict=True):
                    if uid in self.requests:
                        stream, index = self.requests[uid]
                        stream.accept(index, tokens)
            case Call():
                message.run(self)
            case _:
                raise TypeError(f"the API server got a {type(message).__name__}")

    def _deliver(self, delta: Delta) -> None:
        request = self.requests.get(delta.uid)
        if request is None:  # the request was aborted, or has had its final reply
            return
        stream, index = request
        if delta.finish is not None:
            del self.requests[delta.uid]
            self._check_idle()
        stream.put(index, delta)

    def _check_idle(self) -> None:
        if not self.requests:
            self._idle.set()

    # ---- the end ---------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask every worker process to exit."""
        for worker in (self._scheduler, self._detokenizer, *self._tokenizers):
            worker.send(Stop())

    def close(self) -> None:
        """Stop receiving messages and close the sockets."""
        self._closed = True
        asyncio.get_running_loop().remove_reader(self.inbox.fileno())
        self._context.destroy(linger=0)
