"""ZeroMQ PUSH and PULL between the processes of one server. Nothing is ever dropped: no queue has a bound.

The one who pulls binds, everyone who pushes connects; so it does not matter who starts first. What bounds the
queues is the number of open requests, which the API server counts.
"""

from __future__ import annotations

import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator

import msgspec
import zmq

from minisgl.message.messages import AnyMessage, Message, decode


class Addresses(msgspec.Struct, frozen=True):
    """Where each process of a server pulls its messages.

    On Linux these are abstract sockets, which have no file and end with their process; elsewhere they are files in
    ``folder``, which `remove` deletes. With no tokenizer processes the detokenizer's process tokenizes too.
    """

    api: str
    scheduler: str
    detokenizer: str
    tokenizers: list[str]
    followers: list[str]
    folder: str | None = None

    @staticmethod
    def make(tokenizers: int, tp: int) -> Addresses:
        """Fresh addresses, that no other server has."""
        folder = None
        if sys.platform.startswith("linux"):
            base = f"ipc://@minisgl-{secrets.token_hex(16)}-"
        else:
            folder = tempfile.mkdtemp(prefix="minisgl-")
            base = f"ipc://{folder}/"
        detokenizer = base + "detokenizer"
        return Addresses(
            api=base + "api",
            scheduler=base + "scheduler",
            detokenizer=detokenizer,
            tokenizers=[f"{base}tokenizer-{i}" for i in range(tokenizers)] or [detokenizer],
            followers=[f"{base}rank-{i}" for i in range(1, tp)],
            folder=folder,
        )

    def remove(self) -> None:
        """Delete the socket files, where there are any."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    return socket


class Push:
    """Sends to one address. Never blocks. For one thread only, as every ZeroMQ socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str):
        self._socket = _socket(context, zmq.PUSH)
        self._socket.connect(address)

    def send(self, message: Message) -> None:
        self._socket.send(message.encode(), copy=True)

    def send_bytes(self, data: bytes) -> None:
        """Send what is encoded already."""
        self._socket.send(data)

    def close(self, linger: float = 0.0) -> None:
        """Close; what is still unsent has ``linger`` seconds to leave."""
        self._socket.close(linger=int(linger * 1000))


class Pull:
    """Receives what any number of `Push` send to its address, each one's messages in their order."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str):
        self._socket = _socket(context, zmq.PULL)
        self._socket.bind(address)

    def receive(self) -> AnyMessage:
        """Wait for the next message."""
        return decode(self._socket.recv())

    def receive_bytes(self) -> bytes:
        """Wait for the next message and leave it encoded."""
        return self._socket.recv()

    def ready(self) -> bool:
        """Whether `receive` would return at once."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def drain(self, block: bool) -> Iterator[AnyMessage]:
        """The messages that are here now; ``block`` waits for the first one."""
        if block:
            yield self.receive()
        while self.ready():
            yield self.receive()

    def fileno(self) -> int:
        """A descriptor that becomes readable when a message may have come (edge-triggered: then `drain`)."""
        return int(self._socket.getsockopt(zmq.FD))

    def close(self) -> None:
        self._socket.close(linger=0)
