"""`kv_events.endpoint=tcp://…`: publishes which KV pages the prefix cache stores and removes, as vLLM does.

A router that knows the content of each server's cache can send a request to the server that has its prefix. The
messages are those of vLLM 0.28 (``--kv-events-config``): ZeroMQ PUB, MessagePack, sequence numbers, and a ROUTER socket
for messages that a subscriber missed. One message has the events of one turn of the scheduler's loop. Turns that change
nothing send none. A *block* is a KV page.

The scheduler's thread publishes: a PUB socket never blocks, it drops what a slow subscriber does not take. Another
thread answers requests for missed messages, and sleeps otherwise. `docs/operation/kv-events.md` describes the layout
and the guarantees.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import zmq

from minisgl.cluster.kv_events import (
    AllBlocksCleared,
    AnyEvent,
    BlockRemoved,
    BlockStored,
    block_hashes,
    encode,
    root_hash,
)
from minisgl.config import Config, ConfigError
from minisgl.core import I32, EngineSpec, Req
from minisgl.hooks import hookimpl
from minisgl.plugins.observer.kv_events_options import KVEventsConfig

log = logging.getLogger(__name__)

Socket: TypeAlias = zmq.Socket[bytes]

BUFFER_BYTES = 256 << 20
"""Maximum size of the messages that are kept for replay."""
REPLAY_SECONDS = 1.0
"""Seconds that a replaying subscriber may read nothing, before its replay is broken off."""
LOG_SECONDS = 60.0
"""Seconds between two log lines about errors."""
END_SEQ = (2**64 - 1).to_bytes(8, "big")
"""The sequence number of the message that ends a replay: -1 as a signed number."""


@hookimpl
def minisgl_observer(config: Config, spec: EngineSpec) -> KVEvents | None:
    if config.kv_events.endpoint is None:
        return None
    return KVEvents(spec, config.kv_events.hash_seed, Publisher(config.kv_events))


# ---- from pages to blocks ------------------------------------------------------------------------------


class Blocks:
    """Turns the scheduler's events about pages into events about blocks, and knows the hash of every cached page."""

    def __init__(self, num_pages: int, block_size: int, seed: int):
        self.block_size = block_size
        self.stored = self.removed = 0  # number of blocks since the start
        self._root = root_hash(seed)
        self._hashes = [0] * num_pages  # hash of the block that each cached page contains
        self._last: dict[int, int] = {}  # uid of a running request -> hash of the last page of its cached prefix

    def match(self, uid: int, pages: I32) -> None:
        """Record the cached prefix of a request that is being admitted."""
        if len(pages):
            self._last[uid] = self._hashes[pages[-1]]

    def forget(self, uid: int) -> None:
        """Forget a request, which runs no longer."""
        self._last.pop(uid, None)

    def store(self, req: Req, start: int, cached_pages: I32, new_pages: I32) -> list[AnyEvent]:
        """Return the events of ``new_pages``. Arguments as in `minisgl_pages_cached`.

        A page of ``cached_pages`` that is not new was cached before, so its block has a hash.
        """
        is_new = cached_pages == new_pages if len(new_pages) == len(cached_pages) else np.isin(cached_pages, new_pages)
        edges = [0, *(np.flatnonzero(np.diff(is_new)) + 1).tolist(), len(cached_pages)]
        events: list[AnyEvent] = []
        for first, end in pairwise(edges):  # runs of new pages, and of pages that are not
            if is_new[first]:
                events.append(self._store(req, start + first, cached_pages[first:end].tolist()))
            self._last[req.uid] = self._hashes[cached_pages[end - 1]]
        return events

    def _store(self, req: Req, start: int, pages: Sequence[int]) -> BlockStored:
        """Return the event of the request's pages from page number ``start`` on, which are new in the cache."""
        size, salt = self.block_size, req.params.cache_salt
        tokens = _tokens(req, start * size, (start + len(pages)) * size)
        parent = self._last[req.uid] if start else None
        extra_keys: list[tuple[str] | None] = [None] * len(pages)
        salted = b""
        if start == 0 and salt is not None:
            salted = salt.encode("utf-8", "surrogatepass")
            extra_keys[0] = (salted.decode("utf-8", "replace"),)
        hashes = block_hashes(self._root if parent is None else parent, tokens, size, salted)
        for page, value in zip(pages, hashes, strict=True):
            self._hashes[page] = value
        self.stored += len(pages)
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=parent,
            token_ids=tokens.tolist(),
            block_size=size,
            lora_id=None,
            medium="GPU",  # vLLM's word for the memory in which the model runs, a CPU's too
            lora_name=None,
            extra_keys=extra_keys,
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )

    def remove(self, pages: I32) -> BlockRemoved:
        """Return the event of evicted pages."""
        self.removed += len(pages)
        return BlockRemoved([self._hashes[page] for page in pages.tolist()], medium="GPU", group_idx=0)


def _tokens(req: Req, start: int, end: int) -> I32:
    """Return tokens of the request without copying its prompt, where they are in it."""
    return req.prompt_ids[start:end] if end <= len(req.prompt_ids) else req.tokens()[start:end]


# ---- sockets ---------------------------------------------------------------------------------------------


class ReplayBuffer:
    """The last messages, with their sequence numbers: at most ``steps``, and not more than ``max_bytes``.

    Two threads use it.
    """

    def __init__(self, steps: int, max_bytes: int = BUFFER_BYTES):
        self._messages: deque[tuple[int, bytes]] = deque()
        self._steps, self._max_bytes, self._bytes = steps, max_bytes, 0
        self._lock = threading.Lock()

    def append(self, seq: int, payload: bytes) -> None:
        """Add a message, and drop the oldest ones that are too many."""
        with self._lock:
            self._messages.append((seq, payload))
            self._bytes += len(payload)
            while len(self._messages) > self._steps or (self._bytes > self._max_bytes and len(self._messages) > 1):
                self._bytes -= len(self._messages.popleft()[1])

    def since(self, seq: int) -> list[tuple[int, bytes]]:
        """Return the messages from number ``seq`` on, as far as they are kept."""
        with self._lock:
            return [message for message in self._messages if message[0] >= seq]


class Replayer:
    """A thread that sends messages of a buffer again, to the subscribers that ask for them."""

    def __init__(self, context: zmq.Context[Socket], key: str, endpoint: str, buffer: ReplayBuffer):
        self.replays = 0
        self._buffer, self._closing = buffer, False
        self._router = _bind(context, zmq.ROUTER, key, endpoint)
        self._router.set(zmq.ROUTER_MANDATORY, 1)  # a send waits while the subscriber reads nothing
        self._router.set(zmq.SNDTIMEO, int(REPLAY_SECONDS * 1000))
        inbox = context.socket(zmq.PAIR)
        inbox.bind("inproc://stop")
        self._stop = context.socket(zmq.PAIR)
        self._stop.connect("inproc://stop")
        self._thread = threading.Thread(target=self._run, args=(inbox,), name="kv-events-replay", daemon=True)
        self._thread.start()

    def _run(self, inbox: Socket) -> None:
        poller = zmq.Poller()
        poller.register(inbox, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        while inbox not in dict(poller.poll()):
            try:
                self._answer(self._router.recv_multipart())
            except zmq.ZMQError as error:
                log.info("kv_events.replay_endpoint: a replay broke off: %s", error)
        inbox.close(linger=0)
        self._router.close(linger=0)

    def _answer(self, frames: list[bytes]) -> None:
        """Answer a request: the subscriber's identity, an empty frame, the first sequence number in 8 bytes."""
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            return
        identity, _, start = frames
        for seq, payload in self._buffer.since(int.from_bytes(start, "big")):
            if self._closing:
                return
            self._router.send_multipart((identity, b"", seq.to_bytes(8, "big"), payload))
        self.replays += 1  # before the last message: a subscriber that has it finds it counted
        self._router.send_multipart((identity, b"", END_SEQ, b""))

    def close(self) -> None:
        """End the thread."""
        self._closing = True
        self._stop.send(b"")
        self._thread.join(2 * REPLAY_SECONDS)
        self._stop.close(linger=0)


class Publisher:
    """The sockets. Messages have the numbers 0, 1, 2, …, and contain three frames: topic, number, `EventBatch`."""

    def __init__(self, config: KVEventsConfig):
        assert config.endpoint is not None
        self.messages = self.errors = 0
        self._pid = os.getpid()
        self._topic = config.topic.encode("utf-8", "surrogatepass")
        self._next_log = 0.0
        self._context: zmq.Context[Socket] = zmq.Context()
        self._buffer: ReplayBuffer | None = None
        self.replayer: Replayer | None = None
        try:
            self._pub = _bind(self._context, zmq.PUB, "kv_events.endpoint", config.endpoint, config.hwm)
            if config.replay_endpoint is not None:
                self._buffer = ReplayBuffer(config.buffer_steps)
                self.replayer = Replayer(
                    self._context, "kv_events.replay_endpoint", config.replay_endpoint, self._buffer
                )
        except ConfigError:
            self._context.destroy(linger=0)
            raise

    def publish(self, events: list[AnyEvent]) -> None:
        """Publish the events as one message. Count an error, instead of raising it."""
        seq, self.messages = self.messages, self.messages + 1
        try:
            payload = encode(events)
            if self._buffer is not None:
                self._buffer.append(seq, payload)
            self._pub.send_multipart((self._topic, seq.to_bytes(8, "big"), payload), zmq.NOBLOCK)
        except Exception as error:
            self.errors += 1
            if time.monotonic() >= self._next_log:
                self._next_log = time.monotonic() + LOG_SECONDS
                log.error("KV events: message %d can't be published (%d errors so far): %s", seq, self.errors, error)

    def close(self) -> None:
        """Close the sockets. Does nothing in a process that was forked from the one that opened them."""
        if self._context.closed or os.getpid() != self._pid:
            return
        if self.replayer is not None:
            self.replayer.close()
        self._context.destroy(linger=200)


def _bind(context: zmq.Context[Socket], kind: int, key: str, endpoint: str, hwm: int | None = None) -> Socket:
    """Return a socket that listens at ``endpoint``, the value of option ``key``. Raise `ConfigError` if it can't."""
    socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.MAXMSGSIZE, 4096)  # of what others send here: topics and numbers
    if hwm is not None:
        socket.set(zmq.SNDHWM, hwm)
    if "[" in endpoint:
        socket.set(zmq.IPV6, 1)
    try:
        _check_path(endpoint)
        socket.bind(endpoint)
    except (zmq.ZMQError, OSError) as error:
        raise ConfigError(
            f"{key}={endpoint}: {error.strerror}. Use an address of this machine at which no other program listens, "
            "such as tcp://127.0.0.1:5557, or tcp://127.0.0.1:* for a free port."
        ) from error
    log.info("%s: listening at %s", key, socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0"))
    return socket


def _check_path(endpoint: str) -> None:
    """Raise OSError if the path of an ``ipc://`` endpoint is a file, or a socket in use: ZeroMQ would delete either."""
    scheme, _, path = endpoint.partition("://")
    if scheme != "ipc" or not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise FileExistsError(17, "there is a file that is no socket")
    import socket

    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(path) == 0:
            raise FileExistsError(17, "another program listens there")


# ---- the observer ------------------------------------------------------------------------------------------


class KVEvents:
    """Publishes the events of each turn at its end. The first message says that the cache is empty."""

    def __init__(self, spec: EngineSpec, hash_seed: int, publisher: Publisher):
        self._blocks = Blocks(spec.num_pages, spec.page_size, hash_seed)
        self._publisher = publisher
        # If minisgl_closed is never called, the sockets are closed when this object is deleted.
        self._finish = weakref.finalize(self, self._publisher.close)
        self._events: list[AnyEvent] = []
        self._publisher.publish([AllBlocksCleared()])

    @hookimpl
    def minisgl_prefix_matched(self, req: Req, pages: I32) -> None:
        self._blocks.match(req.uid, pages)

    @hookimpl
    def minisgl_pages_cached(self, req: Req, pages: I32, start: int, cached_pages: I32) -> None:
        self._events += self._blocks.store(req, start, cached_pages, pages)

    @hookimpl
    def minisgl_pages_evicted(self, pages: I32) -> None:
        if len(pages):
            self._events.append(self._blocks.remove(pages))

    @hookimpl
    def minisgl_request_retracted(self, req: Req) -> None:
        self._blocks.forget(req.uid)

    @hookimpl
    def minisgl_request_finished(self, req: Req) -> None:
        self._blocks.forget(req.uid)

    @hookimpl
    def minisgl_pages_counted(self) -> None:
        self._flush()

    def _flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._publisher.publish(events)

    @hookimpl
    def minisgl_metrics(self) -> str:
        replayer = self._publisher.replayer
        counts: dict[str, Any] = {
            "messages": self._publisher.messages,
            "stored_blocks": self._blocks.stored,
            "removed_blocks": self._blocks.removed,
            "errors": self._publisher.errors,
            "replays": 0 if replayer is None else replayer.replays,
        }
        return "".join(
            f"# TYPE minisgl_kv_events_{name} counter\nminisgl_kv_events_{name}_total {count}\n"
            for name, count in counts.items()
        )

    @hookimpl
    def minisgl_closed(self) -> None:
        self._flush()
        self._finish()
