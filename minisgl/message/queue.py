"""ZeroMQ PUSH and PULL sockets between the processes of one server.

The queues have no bound, so no message is dropped while its sender and its receiver run.

The receiving process binds the socket and the sending processes connect to it, so the processes may start in any order.
The API server bounds the number of open requests (``server.max_queued``), and with it the length of the queues.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

from minisgl.message import AnyMessage, Message, decode
from minisgl.plugin_manager.discovery import exists, import_module
from minisgl.utils.log import is_logged

log = logging.getLogger(__name__)

FOLDERS = "minisgl.plugins.command.folders"
"""The plugin that also removes the folders of servers that were killed with all of their processes."""


def make_folder() -> str:
    """Make a folder for sockets, which only this user can open, and return its path."""
    return folders.make_folder() if (folders := _folders()) else tempfile.mkdtemp(prefix="minisgl-sockets-")


def remove_folder(folder: str) -> None:
    """Remove a folder of `make_folder`, with its content."""
    shutil.rmtree(folder, ignore_errors=True)
    if folders := _folders():
        folders.unlock(folder)


def _folders() -> Any:
    return import_module(FOLDERS, FOLDERS) if exists(FOLDERS) else None


class Addresses(msgspec.Struct, frozen=True):
    """The address at which each process of a server receives its messages.

    The addresses are socket files in ``folder``, which only the server's user can open. `remove` deletes the folder.
    With no tokenizer process, ``tokenizers`` holds the address of the detokenizer process, which then tokenizes too.
    ``followers`` are those of ranks 1 on.
    """

    api: str
    scheduler: str
    detokenizer: str
    tokenizers: list[str]
    followers: list[str]
    folder: str

    @staticmethod
    def make(tokenizers: int, tp: int) -> Addresses:
        """Return new addresses that no other server uses, for ``tokenizers`` tokenizer processes and ``tp`` ranks."""
        folder = make_folder()
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
        """Delete the folder of the socket files."""
        remove_folder(self.folder)


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    return socket


class Push:
    """A socket that sends messages to one address and never blocks. Like every ZeroMQ socket, it is not thread-safe."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str):
        self._socket = _socket(context, zmq.PUSH)
        self._socket.connect(address)

    def send(self, message: Message) -> None:
        self._socket.send(message.encode(), copy=True)

    def send_bytes(self, data: bytes) -> None:
        """Send a message that is already encoded."""
        self._socket.send(data)

    def close(self, linger: float = 0.0) -> None:
        """Close the socket. ZeroMQ goes on sending the unsent messages for at most ``linger`` seconds."""
        self._socket.close(linger=int(linger * 1000))


class Pull:
    """A socket that receives the messages of any number of `Push` sockets. Each sender's messages keep their order.

    Bytes that are no message are dropped, and counted in ``num_dropped``.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str):
        self._socket = _socket(context, zmq.PULL)
        self._socket.bind(address)
        self.num_dropped = 0

    def receive(self) -> AnyMessage:
        """Wait for the next message, and return it decoded."""
        while (message := self._decoded(self._socket.recv())) is None:
            pass
        return message

    def _decoded(self, data: bytes) -> AnyMessage | None:
        """Return the message, or None if ``data`` is no message."""
        try:
            return decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.num_dropped += 1
            if is_logged(self.num_dropped):
                log.error("dropped %d bytes that are no message (%d so far): %s", len(data), self.num_dropped, error)
            return None

    def receive_bytes(self) -> bytes:
        """Wait for the next message, and return its bytes."""
        return self._socket.recv()

    def ready(self) -> bool:
        """Return whether `receive` would return at once."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for a message. Return whether `receive` would return at once."""
        return bool(self._socket.poll(int(seconds * 1000)))

    def drain(self, block: bool) -> Iterator[AnyMessage]:
        """Yield the messages that have arrived. With ``block``, wait for the first message if there is none."""
        if block:
            yield self.receive()
        while self.ready():
            if (message := self._decoded(self._socket.recv())) is not None:
                yield message

    def fileno(self) -> int:
        """Return a file descriptor that becomes readable when a message may have arrived.

        The descriptor is edge-triggered: after it becomes readable, receive messages until `ready` returns False.
        """
        return int(self._socket.getsockopt(zmq.FD))

    def close(self) -> None:
        self._socket.close(linger=0)
