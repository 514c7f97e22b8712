"""Follows the KV events of one replica, from its start to its end, so that a router's view of its cache is complete.

`docs/operation/kv-events.md` describes the messages. A subscriber belongs to one run of one replica: a replica that is
started again publishes at another address, to another subscriber. So it need not notice restarts, only lost messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable

import msgspec
import zmq
import zmq.asyncio

from minisgl.cluster.kv_events import AllBlocksCleared, AnyEvent, decode

log = logging.getLogger(__name__)

END = b"\xff" * 8
"""The sequence number that ends a replay."""
HWM = 100_000
"""Messages that wait for the router before the replica drops further ones."""
SETTLE_SECONDS = 0.05
"""Seconds from the connection to the replay of the messages before it, so that none falls between the two."""
REPLAY_SECONDS = 5.0
"""Seconds that a replica may take for the next message of a replay."""
TURN = 64
"""Messages that are applied before other tasks of the event loop run."""


class KVSubscriber:
    """Applies the events of a replica in their order. ``apply`` changes the view, such as `Replica.apply`.

    ``gaps`` counts how often messages were lost that the replica could not send again. The view then forgets all
    blocks: it knows too few, and none that the replica has evicted.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, apply: Callable[[Iterable[AnyEvent]], None]):
        self.gaps = self.replays = 0
        self.next = 0
        """Number of the next message."""
        self._endpoint, self._replay_endpoint, self._apply = endpoint, replay_endpoint, apply
        self._context = zmq.asyncio.Context()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop. Afterwards ``apply`` is not called any more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _run(self) -> None:
        try:
            await self._follow()
        except Exception:
            log.exception("the KV events of %s can't be followed any more", self._endpoint)
            self._apply([AllBlocksCleared()])

    async def _follow(self) -> None:
        sub = self._context.socket(zmq.SUB)
        sub.set(zmq.RCVHWM, HWM)
        sub.subscribe(b"")
        connected = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        sub.connect(self._endpoint)
        await connected.recv_multipart()
        sub.disable_monitor()
        await asyncio.sleep(SETTLE_SECONDS)
        await self._catch_up()
        received = 0
        while True:
            _, number, payload = await sub.recv_multipart()
            seq = int.from_bytes(number, "big")
            if seq > self.next:
                await self._catch_up()
            self._receive(seq, payload)
            received += 1
            if received % TURN == 0:
                await asyncio.sleep(0)

    def _receive(self, seq: int, payload: bytes) -> None:
        """Apply a message, unless it was applied already."""
        if seq < self.next:
            return
        if seq > self.next:
            self.gaps += 1
            self._apply([AllBlocksCleared()])
        self.next = seq + 1
        try:
            self._apply(decode(payload))
        except msgspec.MsgspecError as error:
            log.error("message %d of %s is no KV event: %s", seq, self._endpoint, error)
            self._apply([AllBlocksCleared()])

    async def _catch_up(self) -> None:
        """Ask for the messages that were missed, and apply them. Do without them if there is no answer."""
        self.replays += 1
        dealer = self._context.socket(zmq.DEALER)  # it can receive many answers to one request
        dealer.set(zmq.LINGER, 0)
        dealer.connect(self._replay_endpoint)
        try:
            await dealer.send_multipart((b"", self.next.to_bytes(8, "big")))
            with contextlib.suppress(TimeoutError):
                while True:
                    async with asyncio.timeout(REPLAY_SECONDS):
                        _, number, payload = await dealer.recv_multipart()
                    if number == END:
                        return
                    self._receive(int.from_bytes(number, "big"), payload)
                    await asyncio.sleep(0)  # a long replay does not hold up the router
        finally:
            dealer.close()
