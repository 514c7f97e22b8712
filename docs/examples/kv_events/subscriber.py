"""Follow the KV cache of a minisgl or vLLM server.

Usage: python subscriber.py tcp://127.0.0.1:5557 tcp://127.0.0.1:5558
"""

import sys
import time
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

END = b"\xff" * 8  # the sequence number that ends a replay


class BlockStored(msgspec.Struct, tag=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Subscriber:
    """Keeps ``blocks``, the hashes of the blocks that the server has cached.

    ``complete`` is False if blocks may be missing, because their messages were lost and can't be replayed.
    ``restarts`` counts how often a new publisher replaced the previous publisher.
    """

    def __init__(self, endpoint: str, replay_endpoint: str | None = None, topic: str = "", hwm: int = 100_000):
        self.blocks: set[int] = set()
        self.complete = False
        self.last: tuple[int, float] | None = None  # sequence number and time of the last batch
        self.restarts = self.gaps = 0
        self._replayed: dict[int, float] = {}  # the batches of the last replay, which may also arrive live
        self._replay_endpoint = replay_endpoint
        self._decode = msgspec.msgpack.Decoder(EventBatch).decode
        self._context = zmq.Context.instance()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.set(zmq.RCVHWM, hwm)
        self._sub.set(zmq.LINGER, 0)
        self._connections = self._sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._sub.subscribe(topic)
        self._sub.connect(endpoint)

    def poll(self, timeout: float = 1.0) -> bool:
        """Wait for one message, at most ``timeout`` seconds, and apply it. Return False if there was none.

        Call `poll` until it returns False before you rely on ``blocks``.
        """
        poller = zmq.Poller()
        poller.register(self._sub, zmq.POLLIN)
        poller.register(self._connections, zmq.POLLIN)
        ready = dict(poller.poll(int(timeout * 1000)))
        if self._connections in ready:
            # A new connection: to the first publisher, to the same publisher again, or to a new one after a restart.
            recv_monitor_message(self._connections)
            if not self.catch_up():
                self._forget()
            return True
        if self._sub not in ready:
            return False
        _, seq, payload = self._sub.recv_multipart()
        self._receive(int.from_bytes(seq, "big"), self._decode(payload))
        return True

    def _receive(self, seq: int, batch: EventBatch) -> None:
        if self._replayed.get(seq) == batch.ts:
            return  # it was in the last replay
        if self.last is None or seq != self.last[0] + 1:
            if self.last is not None and seq > self.last[0]:
                self.gaps += 1
            if self.catch_up():
                return  # now `last` is this message or a later one; or the message is from before a restart
            self._forget()
            self.complete = seq == 0
        self._apply(seq, batch)

    def catch_up(self) -> bool:
        """Ask for the last batch again and for the batches after it. If the last batch differs, there was a restart.

        Return False if there is no answer.
        """
        first = 0 if self.last is None else self.last[0]
        batches = self._replay(first)
        if batches is None:
            return False
        if self.last is not None:
            if batches and (batches[0][0], batches[0][1].ts) == self.last:
                batches = batches[1:]
            else:  # the publisher was restarted, or does not keep the last batch any more
                self.restarts += not batches or batches[0][0] <= first
                self._forget()
                batches = self._replay(0) or []
        if self.last is None:
            self.complete = bool(batches) and batches[0][0] == 0
        for seq, batch in batches:
            if self.last is not None and seq != self.last[0] + 1:  # a message that the publisher could not send
                self._forget()
            self._apply(seq, batch)
        self._replayed = {seq: batch.ts for seq, batch in batches}
        return True

    def _replay(self, first: int) -> list[tuple[int, EventBatch]] | None:
        """Return the batches from number ``first`` on that the server has, or None if it does not answer."""
        if self._replay_endpoint is None:
            return None
        batches = []
        # A DEALER can receive many answers to one request; a REQ socket receives one. Its first frame must be empty.
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.set(zmq.LINGER, 0)
            dealer.set(zmq.RCVHWM, 0)
            dealer.connect(self._replay_endpoint)
            dealer.send_multipart((b"", first.to_bytes(8, "big")))
            while dealer.poll(1000):
                _, seq, payload = dealer.recv_multipart()
                if seq == END:
                    return batches
                batches.append((int.from_bytes(seq, "big"), self._decode(payload)))
        return None

    def _apply(self, seq: int, batch: EventBatch) -> None:
        self.last = seq, batch.ts
        for event in batch.events:
            match event:
                case BlockStored(block_hashes=hashes):
                    self.blocks.update(hashes)
                case BlockRemoved(block_hashes=hashes):
                    self.blocks.difference_update(hashes)
                case AllBlocksCleared():
                    self.blocks.clear()

    def _forget(self) -> None:
        self.blocks.clear()
        self._replayed.clear()
        self.last, self.complete = None, False

    def close(self) -> None:
        self._sub.disable_monitor()
        self._connections.close(linger=0)
        self._sub.close()


if __name__ == "__main__":
    subscriber = Subscriber(*sys.argv[1:])
    while True:
        if subscriber.poll():
            state = "complete" if subscriber.complete else "blocks may be missing"
            print(time.strftime("%X"), subscriber.last, f"{len(subscriber.blocks)} blocks, {state}", flush=True)
