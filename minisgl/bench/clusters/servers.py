"""Plays requests to real servers: the client itself routes them, with a policy of `minisgl.cluster.routing`.

The view of a server is its KV events, if it publishes them, and otherwise what was sent to it before. A router process
between client and servers would add its own time to every request; here, the policies are compared without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
import numpy as np
import zmq

from minisgl.bench.clusters.results import Served
from minisgl.bench.loadgen.completion import RequestRecord, StreamReader, Template, exchange
from minisgl.bench.loadgen.http import HttpClient, ServerAddress
from minisgl.bench.loadgen.prompts import PromptFactory
from minisgl.bench.loadgen.traces import TraceRequest
from minisgl.cluster.kv_events import BlockStored, block_hashes, decode, root_hash
from minisgl.cluster.routing import Replica, RoutingPolicy

TIMEOUT = 600.0
"""Seconds that a request may take."""
Socket: TypeAlias = zmq.Socket[bytes]


class RememberedReplica(Replica):
    """The view of a server without KV events: it has cached the prompts that ended there last, ``capacity`` blocks."""

    def __init__(self, block_size: int, capacity: int):
        super().__init__(block_size)
        self._capacity = capacity
        self._recent: OrderedDict[int, None] = OrderedDict()

    def end(self, key: Hashable) -> None:
        """Record the end of a request: its blocks are cached, and the least recently used ones are evicted."""
        request = self._open.get(key)
        super().end(key)
        for block in reversed(request.block_hashes if request else ()):  # a prefix is evicted after what follows it
            self._recent[block] = None
            self._recent.move_to_end(block)
        while len(self._recent) > self._capacity:
            self._recent.popitem(last=False)
        self.blocks = set(self._recent)

    def stop(self) -> None:
        """Record that the server is dead."""
        super().stop()
        self._recent.clear()


class Subscription:
    """The KV events of a server, without replays: after a gap, the view begins again with nothing cached."""

    def __init__(self, address: str):
        self._socket: Socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.subscribe("")
        self._socket.connect(address)
        self._next = 0
        self.messages = 0
        self.block_size: int | None = None
        """The server's page size, once a block was stored."""

    def read(self, view: Replica) -> None:
        """Apply the messages that have arrived."""
        while self._socket.poll(0):
            _, number, payload = self._socket.recv_multipart()
            if int.from_bytes(number, "big") != self._next:
                view.blocks.clear()
            self._next = int.from_bytes(number, "big") + 1
            self.messages += 1
            with contextlib.suppress(msgspec.MsgspecError):  # an event that only another version has
                events = decode(payload)
                self.block_size = next((e.block_size for e in events if isinstance(e, BlockStored)), self.block_size)
                view.apply(events)

    def close(self) -> None:
        self._socket.close()


@dataclass
class Server:
    """A server, the router's view of it, and its KV events if it publishes them."""

    http: HttpClient
    view: Replica
    subscription: Subscription | None = None
    records: list[RequestRecord] = field(default_factory=list)


class _Reader(StreamReader):
    """Also tells the view when the first token arrives."""

    def __init__(self, record: RequestRecord, view: Replica):
        super().__init__(record, ignore_eos=True)
        self._told, self._own_record, self._view = False, record, view

    def feed(self, data: bytes, now: float) -> None:
        super().feed(data, now)
        if self._own_record.times and not self._told:
            self._told = True
            self._view.first_token(self._own_record.index)


@dataclass(frozen=True)
class Play:
    """What the runs of all policies have in common: the servers' addresses and model, and the view's blocks.

    ``events`` are the addresses of the servers' KV events, or empty. ``page_size`` is the servers' option, and
    ``capacity`` the number of pages that a server without events is taken to have.
    """

    addresses: Sequence[ServerAddress]
    events: Sequence[str]
    model: str
    page_size: int
    capacity: int

    @contextlib.contextmanager
    def servers(self) -> Iterator[list[Server]]:
        """Connect to the servers, and disconnect in the end."""
        with contextlib.ExitStack() as stack:
            found = []
            for place, address in enumerate(self.addresses):
                http = HttpClient(address)
                stack.callback(http.close)
                if not self.events:
                    found.append(Server(http, RememberedReplica(self.page_size, self.capacity)))
                    continue
                subscription = Subscription(self.events[place])
                stack.callback(subscription.close)
                found.append(Server(http, Replica(self.page_size), subscription))
            yield found

    def run(
        self,
        requests: Sequence[TraceRequest],
        prompts: PromptFactory,
        policy: RoutingPolicy,
        speed: float,
        progress: Callable[[], object] = lambda: None,
    ) -> tuple[list[Served], list[str]]:
        """Play the requests ``speed`` times as fast as their times. Return their outcomes, and the failures."""
        servers = asyncio.run(self._connect_and_play(requests, prompts, policy, speed, progress))
        records = [(place, record) for place, server in enumerate(servers) for record in server.records]
        served = [
            Served(place, r.ttft, r.prompt_len, r.cached_len, r.output_len) for place, r in records if r.completed
        ]
        return served, [record.error or "interrupted" for _, record in records if not record.completed]

    async def _connect_and_play(self, requests: Sequence[TraceRequest], *others: Any) -> list[Server]:
        with self.servers() as servers:  # the connections belong to this event loop
            await self._play(servers, requests, *others)
            return servers

    async def _play(
        self,
        servers: Sequence[Server],
        requests: Sequence[TraceRequest],
        prompts: PromptFactory,
        policy: RoutingPolicy,
        speed: float,
        progress: Callable[[], object],
    ) -> None:
        template = Template(False, self.model, 0.0, True, 0)
        bodies = [
            (ids, template.body(index, ids, request.output_len))
            for index, request in enumerate(requests)
            if isinstance(ids := prompts.build(index, request), list)
        ]
        root, first, start = root_hash(0), requests[0].timestamp or 0.0, time.perf_counter()
        tasks = []
        views = [server.view for server in servers]
        for index, (request, (ids, body)) in enumerate(zip(requests, bodies, strict=True)):
            due = start + ((request.timestamp or 0.0) - first) / speed
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            for server in servers:
                if server.subscription is not None:
                    server.subscription.read(server.view)
            whole = np.array(ids[: len(ids) // self.page_size * self.page_size], np.int32)
            hashes = block_hashes(root, whole, self.page_size)
            server = servers[policy.choose(hashes, len(ids), views)]
            server.view.start(index, hashes, len(ids), request.output_len)
            record = RequestRecord(index, request.output_len, len(ids), due)
            server.records.append(record)
            tasks.append(asyncio.create_task(self._send(server, record, template.path, body, progress)))
        await asyncio.gather(*tasks)

    async def _send(
        self, server: Server, record: RequestRecord, path: str, body: bytes, progress: Callable[[], object]
    ) -> None:
        await exchange(server.http, path, body, record, _Reader(record, server.view), TIMEOUT)
        server.view.end(record.index)
        progress()
