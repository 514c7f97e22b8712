"""The ranks of a server: each is a worker process of the server's launcher, which watches them all.

Rank 0 sends each step to the others over ZeroMQ. They need no scheduler, and run each `Call` of the API server
between two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import zmq

from minisgl.cluster.process import free_port
from minisgl.engine.ranks import Peers, follow
from minisgl.message import Call, Message, decode
from minisgl.message.queue import Addresses, Pull, Push
from minisgl.plugin_manager.manager import PluginManager
from minisgl.server.rank_process import build_rank, ready, run_leader
from minisgl.server.worker_pool import Report

END = b""
"""The message that rank 0 sends to the other ranks after its last step."""
CALL = Call("").encode()[:6]
"""The beginning of each encoded `Call`, and of no encoded step: the kind of message."""


class Follower(NamedTuple):
    """What the function of a `Call` gets of a rank above 0. ``to_api`` sends a message to the API server."""

    inbox: Pull
    manager: PluginManager
    to_api: Callable[[Message], None]


def bodies(tp: int) -> list[Callable[..., None]]:
    """Return the ``body`` arguments of `worker_main` for ``tp`` ranks, which connect to each other at a free port."""
    rendezvous = f"127.0.0.1:{free_port()}"
    others = [partial(run_other, rank=rank, rendezvous=rendezvous) for rank in range(1, tp)]
    return [partial(run_first, rendezvous=rendezvous), *others]


def run_first(report: Report, addresses: Addresses, encoded: bytes, rendezvous: str) -> None:
    """Run rank 0 until the server ends: see `minisgl.server.rank_process.run_rank`."""
    config, manager, engine = build_rank(encoded, 0, rendezvous)
    context = zmq.Context()
    engine.peers = LocalRanks(context, addresses)
    run_leader(report, addresses, context, config, manager, engine)
    engine.close()  # not after an error: see `run_rank`
    context.destroy(linger=500)


def run_other(report: Report, addresses: Addresses, encoded: bytes, rank: int, rendezvous: str) -> None:
    """Run another rank until rank 0 has sent its last step."""
    _, manager, engine = build_rank(encoded, rank, rendezvous)
    context = zmq.Context()
    inbox = Pull(context, addresses.followers[rank - 1])
    report.send(ready(manager, engine))
    follow(engine, _next_step(Follower(inbox, manager, Push(context, addresses.api).send)))
    engine.close()  # not after an error: see `run_rank`
    context.destroy(linger=500)


class LocalRanks(Peers):
    """Rank 0's connections to the ranks that the same launcher started. They receive steps over ZeroMQ."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], addresses: Addresses):
        self._queues = [Push(context, address) for address in addresses.followers]

    def send(self, data: bytes) -> None:
        """Send an encoded step to every rank."""
        for each in self._queues:
            each.send_bytes(data)

    def end(self) -> None:
        """Tell every rank that no step follows."""
        self.send(END)


def _next_step(rank: Follower) -> Callable[[], bytes | None]:
    """Return the argument of `follow`: a function that waits for the next step, and meanwhile runs each `Call`."""

    def receive() -> bytes | None:
        while (data := rank.inbox.receive_bytes()).startswith(CALL):
            call = decode(data)
            assert isinstance(call, Call)
            call.run(rank)
        return data or None

    return receive
